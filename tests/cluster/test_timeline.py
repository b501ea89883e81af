"""The timeline: slices on one clock from durations, and the trace that Perfetto loads."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from cluster.core import SchedulerCore
from cluster.events import Action, Event
from cluster.timeline import SCHEDULER, TARGET, Timeline
from tests.cluster.pipelined import PipelineWorld


class RecordedWorld(PipelineWorld):
    """A world whose core's turns go into a timeline."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.timeline = Timeline(100_000)
        handle = self.core.handle

        def recorded(event: Event, now: float) -> list[Action]:
            actions = handle(event, now)
            self.timeline.handled(event, actions, self.core, now, now)
            return actions

        self.core.handle = recorded  # type: ignore[method-assign]


def recorded(num_requests: int = 8, **settings: object) -> RecordedWorld:
    # Every drafter has a core of its own: that one waits for another's core, only a profiler could tell.
    world = RecordedWorld({"micro_batches": 2}, noise=0.0, num_cores=4, **settings)  # type: ignore[arg-type]
    for number in range(num_requests):
        world.submit(number, tokens=40)
    world.run()
    return world


def test_slices_lie_where_the_workers_worked() -> None:
    world = recorded()
    for track in (TARGET, *world.drafters):
        found = [one for one in world.timeline._slices if one.track == track]
        worked = world.of(track)
        assert len(found) == len(worked)
        # How long messages take is known after some calls; here they are as quick both ways, as is assumed.
        for one, true in list(zip(found, worked, strict=True))[20:]:
            assert one.start == pytest.approx(true.start, abs=3e-4)
            assert one.end == pytest.approx(true.end, abs=3e-4)
        for before, after in pairwise(found):
            assert before.end <= after.start + 1e-9


def test_the_trace_has_a_track_for_every_worker() -> None:
    world = recorded()
    trace = json.loads(world.timeline.trace())
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(names.values()) >= {TARGET, SCHEDULER}
    slices = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0 and e["tid"] in names and e["pid"] == 1 for e in slices)
    verifies = [e for e in slices if names[e["tid"]] == TARGET and e["name"] == "verify"]
    drafts = [e for e in slices if e["name"] == "draft"]
    assert {batch for e in verifies for batch in e["args"]["micro_batches"]} == {0, 1}
    assert all(e["args"]["tokens"] >= len(e["args"]["requests"]) for e in verifies)
    assert all(e["args"]["depth"] > 0 for e in drafts)
    assert any(
        d["ts"] < v["ts"] + v["dur"] and v["ts"] < d["ts"] + d["dur"] for v in verifies for d in drafts
    ), "with two micro-batches drafting and verification overlap"


def test_only_the_newest_slices_are_kept() -> None:
    timeline = Timeline(5)
    world = PipelineWorld({})
    core: SchedulerCore = world.core
    from cluster.events import Tick

    for second in range(20):
        timeline.handled(Tick(), [], core, float(second), second + 0.5)
    slices = [e for e in json.loads(timeline.trace())["traceEvents"] if e["ph"] == "X"]
    assert [e["ts"] for e in slices] == [1e6 * second for second in range(15, 20)]
