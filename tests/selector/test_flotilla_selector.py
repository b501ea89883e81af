"""Full-information selection: what it goes by, when it moves, what it asks to know."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace

from selector.acceptance import AcceptanceEstimates
from selector.flotilla import RECONSIDER_STEPS, Flotilla
from selector.protocol import PoolView
from tests.selector.selector_world import Costs, World, drafter


def world(*names: str, capacity: int = 4, max_depth: int = 6) -> World:
    made = World(Flotilla(), max_depth=max_depth)
    made.add(*(drafter(name, capacity=capacity) for name in names))
    return made


def score(made: World, rates: dict[str, float], scored: int = 40) -> None:
    for request_id in made.requests:
        for kind, rate in rates.items():
            made.selector.score(request_id, kind, scored, round(rate * scored))


def test_goodput_counts_and_not_acceptance() -> None:
    made = world("small", "large")
    made.arrive("r")
    score(made, {"small": 0.80, "large": 0.85})
    assert made.step()["r"] == "small"  # four times as fast
    made = world("small", "large")
    made.arrive("r")
    score(made, {"small": 0.40, "large": 0.85})
    assert made.step()["r"] == "large"


@pytest.mark.parametrize("rates", [{"small": 0.02, "large": 0.05}, {"small": 0.05, "large": 0.02}])
def test_nobody_is_left_out_where_drafting_does_not_pay(rates: dict[str, float]) -> None:
    """Whether to draft is a question of the whole step, and the policy's: it needs the best there is."""
    made = world("small", "large")
    made.arrive("r")
    score(made, rates, 400)
    # The one that loses least by drafting: the large one takes four times as long.
    assert made.step()["r"] == "small"
    score(made, {"large": 0.9}, 4000)
    for _ in range(RECONSIDER_STEPS):
        chosen = made.step()
    assert chosen["r"] == "large"


def test_without_drafting_nobody_is_assigned() -> None:
    made = world("small", max_depth=0)
    made.arrive("r")
    assert made.step()["r"] == ""
    assert isinstance(made.selector, Flotilla)
    assert made.selector.explore(made.views()[0], made.pool(), has_ended=False) == ""


def test_a_drafter_is_reconsidered_every_few_steps_and_not_in_between() -> None:
    made = world("small", "middle")
    made.arrive("r")
    score(made, {"small": 0.8, "middle": 0.5})
    assert made.step()["r"] == "small"
    score(made, {"small": 0.1, "middle": 0.9}, 400)
    places = [made.step()["r"] for _ in range(RECONSIDER_STEPS)]
    assert places == ["small"] * (RECONSIDER_STEPS - 1) + ["middle"]


def test_who_lost_the_only_drafter_has_it_again_as_soon_as_it_is_back() -> None:
    """A late answer takes a drafter away for a step or two; a long request was without for 64 steps."""
    made = world("small")
    made.arrive("r")
    made.requests["r"] = replace(made.requests["r"], num_steps=5000)
    made.step()
    made.lose("small")
    assert made.step()["r"] == ""
    made.add(drafter("small"))
    assert made.step()["r"] == "small"


def test_a_place_that_becomes_free_is_taken_at_once() -> None:
    """A long request that had found none waited for it for up to 64 steps."""
    made = world("small", capacity=2)
    for name in "abc":
        made.arrive(name)
        made.requests[name] = replace(made.requests[name], num_steps=5000)
    for _ in range(3 * RECONSIDER_STEPS):
        places = made.step()
    served, left = max(places, key=places.__getitem__), min(places, key=places.__getitem__)
    assert not places[left]
    made.leave(served)
    assert made.step()[left] == "small"


def test_a_small_advantage_moves_nobody() -> None:
    made = world("small", "small-b")
    made.arrive("r")
    score(made, {"small": 0.80, "small-b": 0.70}, 30)
    assert made.step()["r"] == "small"
    made.selector.score("r", "small-b", 30, 27)
    for _ in range(3 * RECONSIDER_STEPS):
        assert made.step()["r"] == "small"


def test_moving_must_pay_for_its_reading_before_the_request_ends() -> None:
    for remaining, expected in ((1000, "middle"), (3, "large")):
        made = world("large", "middle")
        made.arrive("r")
        made.requests["r"] = replace(made.requests["r"], num_context=600, num_prompt=500)
        score(made, {"large": 0.9, "middle": 0.1}, 200)
        made.step()
        score(made, {"middle": 0.9}, 3000)
        for _ in range(RECONSIDER_STEPS):
            made.requests["r"] = replace(made.requests["r"], num_remaining=remaining)
            chosen = made.step()
        assert chosen["r"] == expected


def test_too_few_places_go_to_those_who_gain_most() -> None:
    made = world("small", "middle", capacity=1)
    for name in ("a", "b", "c"):
        made.arrive(name)
    for name, rates in (("a", (0.9, 0.88)), ("b", (0.9, 0.2)), ("c", (0.3, 0.2))):
        for kind, rate in zip(("small", "middle"), rates, strict=True):
            made.selector.score(name, kind, 1000, round(1000 * rate))
    assert made.step() == {"a": "middle", "b": "small", "c": ""}
    prices = made.selector.prices()
    assert prices["small"] > prices["middle"] > 0.0


def test_prices_fall_to_zero_when_there_is_room_for_all() -> None:
    made = world("small", capacity=1)
    made.arrive("a")
    made.arrive("b")
    made.step()
    assert made.selector.prices()["small"] > 0.0
    made.leave("b")
    for _ in range(200):
        made.step()
    assert made.selector.prices() == {"small": 0.0}


def test_shared_estimates_are_fed_by_their_owner_alone() -> None:
    estimates = AcceptanceEstimates()
    selector = Flotilla(estimates)
    selector.begin("r", [1, 2, 3])
    selector.score("r", "small", 10, 9)
    assert estimates.evidence("r", "small") == 0
    estimates.observe("r", "small", 10, 9)
    assert estimates.evidence("r", "small") == 10


def test_whom_a_running_request_might_move_to_is_scored_in_growing_intervals() -> None:
    made = world("small", "middle")
    made.arrive("r")
    made.selector.score("r", "small", 40, 26)
    selector = made.selector
    assert isinstance(selector, Flotilla)
    asked_at = [0]
    for _ in range(1000):
        place = made.step(1)["r"]
        view = made.views()[0]
        idle = {name: d for name, d in made.pool().drafters.items() if name != place}
        asked = selector.explore(view, PoolView(idle, Costs(), 6), has_ended=False)
        if asked:
            assert asked == "middle"
            asked_at.append(view.num_context - view.num_prompt)
            unread = asked_at[-1] - asked_at[-2]
            selector.score("r", asked, unread, round(0.66 * unread))
    assert asked_at[1] == 8
    assert len(asked_at) >= 4
    assert all(later >= 2 * earlier for earlier, later in pairwise(asked_at))


def test_a_drafter_that_cannot_follow_is_not_asked_over_and_over() -> None:
    made = world("small", "middle")
    made.arrive("r")
    selector = made.selector
    assert isinstance(selector, Flotilla)
    num_asked = 0
    for _ in range(1000):
        made.step(1)
        if asked := selector.explore(made.views()[0], made.pool(), has_ended=False):
            num_asked += 1
            selector.score("r", asked, 1, 0)
    assert num_asked <= 8


def test_who_cannot_be_better_is_not_scored() -> None:
    made = world("small", "middle")
    made.arrive("r")
    score(made, {"small": 0.9, "middle": 0.3}, 300)
    selector = made.selector
    assert isinstance(selector, Flotilla)
    for _ in range(100):
        made.step()
        assert selector.explore(made.views()[0], made.pool(), has_ended=False) == ""


def test_ended_requests_are_read_for_later_ones_ever_more_rarely() -> None:
    made = world("small", "middle")
    selector = made.selector
    assert isinstance(selector, Flotilla)
    asked = []
    for number in range(300):
        made.arrive(f"r{number}")
        made.step()
        made.step()
        found = selector.explore(made.views()[0], made.pool(), has_ended=True)
        asked.append(bool(found))
        made.leave(f"r{number}")
    assert sum(asked[:24]) > 20
    assert sum(asked[-80:]) <= 20


@pytest.mark.parametrize(("before", "after"), [(0.85, 0.5), (0.5, 0.85)])
def test_a_drafter_that_changes_is_believed_anew(before: float, after: float) -> None:
    estimates = AcceptanceEstimates()
    estimates.begin("r", [1, 2, 3])
    for rate, num_tokens in ((before, 20_000), (after, 400)):
        for _ in range(num_tokens // 20):
            estimates.observe("r", "small", 20, round(20 * rate))
    assert estimates.rate("r", "small") == pytest.approx(after, abs=0.05)
    assert estimates.evidence("r", "small") < 1000


def test_the_destination_is_the_rival_that_may_be_better() -> None:
    made = world("small", "middle")
    made.arrive("r")
    score(made, {"small": 0.7, "middle": 0.68}, 20)
    place = made.step()["r"]
    other = "middle" if place == "small" else "small"
    score(made, {other: 0.75}, 40)
    assert made.selector.destination(made.views()[0], made.pool()) in ("", other)
    score(made, {other: 0.95}, 400)
    assert made.selector.destination(made.views()[0], made.pool()) == other
