"""Who comes back as it was told is not judged more strictly than who comes unbidden."""

from __future__ import annotations

import msgspec
import pytest

from cluster.door import Admitted
from cluster.promises import SOON_S, Promises
from cluster.stream_messages import Objective, Rejected, Submit, Terms
from tests.cluster.test_overload_admission import Refusing, submitted


def predicted_ms(world: Refusing, asked: Submit) -> float:
    """To the first token, if it came now."""
    answer = world.core.door.decide(msgspec.structs.replace(asked, on_miss="serve"), world.core, world.now)
    assert isinstance(answer, Admitted)
    assert answer.predicted is not None
    return answer.predicted.ttft_ms


def promise(world: Refusing, asked: Submit, after_s: float) -> None:
    made_at = world.now + after_s - 1.0
    assert world.core.door.promises.make(asked, 0.0, 0.01, made_at, may_be_near=True) == 1.0


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize(("over", "is_taken"), [(0.95, True), (1.05, True), (1.2, False)])
def test_a_prediction_may_exceed_the_objective_by_the_tolerance(
    over: float, is_taken: bool, is_told: bool
) -> None:
    world = Refusing()
    objective = Objective(ttft_ms=predicted_ms(world, submitted(10)) / over)
    asked = msgspec.structs.replace(submitted(10), objective=objective, on_miss="reject")
    if is_told:
        promise(world, asked, 0.0)
    answer = world.core.door.decide(asked, world.core, world.now)
    assert isinstance(answer, Admitted) == is_taken


@pytest.mark.parametrize("is_told", [False, True])
def test_so_it_is_on_the_terms_of_a_lower_tier(is_told: bool) -> None:
    """Its time is the one at which it would meet them."""
    world = Refusing()
    now_ms = predicted_ms(world, submitted(10))
    lower = Terms(tier="lower", objective=Objective(ttft_ms=now_ms / 0.9))
    asked = msgspec.structs.replace(
        submitted(10), objective=Objective(ttft_ms=now_ms / 2), on_miss="downgrade", downgrades=(lower,)
    )
    promise(world, submitted(11), 2.0)  # so that newcomers must be well on time
    if is_told:
        promise(world, asked, 0.0)
    answer = world.core.door.decide(asked, world.core, world.now)
    assert isinstance(answer, Admitted) == is_told
    if isinstance(answer, Admitted):
        assert answer.submit.tier == "lower"


def told_when_busy(*, is_away: bool) -> float:
    """When a newcomer is told to come, after clients came as told while the target was there, or away."""
    world = Refusing()
    world.drain()
    for number in range(30):
        promise(world, submitted(100 + number), 0.0)
    if is_away:
        world.lose("verifier")
        for number in range(30):
            told = world.ask(100 + number, world.now)
            assert told is not None
            assert told.code == "not_ready"
        world.start_target()
    world.now += 10.0
    for number in range(200, 240):
        world.serve(number, 150)
    for _ in range(30):
        world.answer_one()
    hasty = msgspec.structs.replace(submitted(10), objective=Objective(ttft_ms=30.0), on_miss="reject")
    answer = world.core.door.decide(hasty, world.core, world.now)
    assert isinstance(answer, Rejected)
    assert answer.retry_after_s is not None
    return answer.retry_after_s


def test_an_outage_says_nothing_of_how_fast_the_load_falls() -> None:
    """Each client that came in vain while the target was away made later times longer, up to sixteenfold."""
    assert told_when_busy(is_away=True) <= 1.5 * told_when_busy(is_away=False)


@pytest.mark.parametrize("after_s", [20.0, 40.0, 300.0])
def test_whoever_can_come_late_only_is_told_the_next_time_there_is_room(after_s: float) -> None:
    """Where waits were long, all tried the same 64 times, and once those were taken an hour was told."""
    promises = Promises(3600.0)
    told = [promises.make(submitted(n), after_s, 0.15, 0.0, may_be_near=False) for n in range(400)]
    assert max(told) < 3600.0
    assert len(promises) == len(set(told)) == 400
    if after_s > SOON_S:  # who could come sooner still finds what is free before
        assert promises.make(submitted(500), after_s / 2, 0.15, 0.0, may_be_near=False) == after_s / 2
