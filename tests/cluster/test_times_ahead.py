"""Steps sent ahead, on a clock: the target is never idle, and what is measured of them is what they took."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import mean
from unittest.mock import patch

import pytest

from cluster.cost_model import VERIFY_PLAIN
from cluster.events import Action, Event
from cluster.stream_messages import Speculation
from cluster.timeline import TARGET, Timeline
from engine.sampling_params import SamplingParams
from tests.cluster.pipelined import MESSAGE_S, PipelineWorld, Slice
from tests.cluster.simulated import submit
from tests.cluster.test_core import World

NUM_TOKENS = 100


class TimedWorld(PipelineWorld):
    """Has a timeline of all calls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.timeline = Timeline(100_000)
        handle, reflect = self.core.handle, self.core.reflect

        def timed_handle(event: Event, now: float) -> list[Action]:
            actions = handle(event, now)
            self.timeline.handled(event, actions, self.core, now, now)
            return actions

        def timed_reflect() -> list[Action]:
            actions = reflect()
            self.timeline.sent(actions, self.core, self.now)
            return actions

        # For as long as the world, and its core, live.
        patch.multiple(self.core, handle=timed_handle, reflect=timed_reflect).start()


def served(num_requests: int, *, async_scheduling: bool) -> TimedWorld:
    scheduler: dict[str, object] = {"async_scheduling": async_scheduling}
    world = TimedWorld(scheduler, {"name": "autoregressive"}, noise=0.0)
    for number in range(num_requests):
        world.submit(number, tokens=NUM_TOKENS)
    world.run()
    return world


def steps(world: TimedWorld) -> list[Slice]:
    """What the target did once all were prefilled."""
    num_requests = len(world.submits)
    found = [one for one in world.of("target") if len(one.requests) == num_requests]
    assert len(found) > NUM_TOKENS // 2
    return found[2:]


@pytest.mark.parametrize("num_requests", [1, 8])
def test_the_target_goes_on_at_once(num_requests: int) -> None:
    for async_scheduling, idle_s in ((True, 0.0), (False, 2 * MESSAGE_S)):
        found = steps(served(num_requests, async_scheduling=async_scheduling))
        for before, after in pairwise(found):
            assert after.start - before.end == pytest.approx(idle_s, abs=1e-9)


@pytest.mark.parametrize("num_requests", [1, 8])
def test_an_iteration_is_as_long_as_its_forward(num_requests: int) -> None:
    world = served(num_requests, async_scheduling=True)
    forward_s = mean(one.end - one.start for one in steps(world))
    planner, totals = world.core.planner, world.core.totals
    assert planner.step_s == pytest.approx(forward_s, rel=0.15)
    assert totals.step_verify_s == pytest.approx(totals.step_s, rel=0.05)
    assert planner.overhead.plain_s(num_requests) < MESSAGE_S / 2
    assert world.core.batcher.pace.beside_s.value < MESSAGE_S / 2
    assert world.core.cost.correction(VERIFY_PLAIN) == pytest.approx(1.0, rel=0.01)
    account = world.core.cost.accounts[VERIFY_PLAIN]
    # The context of each is the one that it has by then.
    assert account.error_s < 1e-3 * account.actual_s
    waiting = served(num_requests, async_scheduling=False)
    assert waiting.core.planner.overhead.plain_s(num_requests) == pytest.approx(2 * MESSAGE_S, rel=0.2)


def test_the_timeline_has_each_step_when_it_was_computed() -> None:
    world = served(2, async_scheduling=True)
    found = [one for one in world.timeline._slices if one.track == TARGET]
    worked = world.of("target")
    assert len(found) == len(worked)
    for one, true in list(zip(found, worked, strict=True))[20:]:
        assert one.start == pytest.approx(true.start, abs=3e-4)
        assert one.args["tokens"] == len(true.requests)
        assert one.args["depth"] == 0


def test_how_long_the_target_has_work_for_counts_both_steps() -> None:
    world = World(1, "autoregressive")
    world.send(submit(0, world.rng, sampling=SamplingParams(temperature=0.0, max_tokens=40)))
    calls = world.core.verify_calls
    reading, step = calls.all_outstanding
    assert (reading.is_ahead, step.is_ahead) == (False, True)
    assert calls.left_s(world.now) == pytest.approx(reading.predicted_s + step.predicted_s)
    world.answer_one()
    first, second = calls.all_outstanding
    assert (first.is_ahead, second.is_ahead) == (False, True)
    assert calls.left_s(world.now) == pytest.approx(first.predicted_s + second.predicted_s)
    # By then the request has one token more.
    num_context = world.core.requests["r0"].num_tokens + 1
    assert second.parts.profile_s == world.core.cost.profile.target.seconds(1, 1, num_context)
    world.answer_one()
    assert calls.all_outstanding[0] is second
    # It began when the answer came, however long before that it was sent.
    assert (second.sent_at, second.is_ahead) == (world.now, False)
    world.drain()
    assert calls.left_s(world.now) == 0.0


def test_a_step_of_two_at_the_target_may_still_be_traced() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    traces: list[list[int]] = []

    class Traced(World):
        def observe(self, actions: Sequence[Action]) -> None:
            for action in actions:
                for event in getattr(action, "events", ()):
                    if event.trace is not None:
                        traces.append(event.trace.tokens)

    world = Traced(1, "autoregressive")
    request = submit(0, world.rng, sampling=sampling, speculation=Speculation(trace=True))
    world.send(request)
    world.drain()
    world.check_ends()
    # Each step's root is the token that the step before it brought.
    known = [request.prompt[-1], *world.output["r0"]]
    assert [tokens[0] for tokens in traces] == known[:-1]
