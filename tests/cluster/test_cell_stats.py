"""What a cell says of the requests with objectives that it has: it is by this that cells are added."""

from __future__ import annotations

import msgspec
import pytest

from cluster.cell_stats import CellStats
from cluster.requests import Request
from cluster.stream_messages import Objective
from engine.sampling_params import SamplingParams
from tests.cluster.simulated import submit
from tests.cluster.test_core import World


class Queue(list[Request]):
    """A queue that notes how often somebody is looked for in it."""

    num_searches = 0

    def index(self, value: Request, *_: object) -> int:
        self.num_searches += 1
        return super().index(value)


def measured(e2e_ms: float) -> dict[str, float]:
    """Of a cell with more requests than it can decode at once, each to be done within a time."""
    world = World(1, "autoregressive")
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    for number in range(36):
        asked = submit(number, world.rng, prompt=[1] * 8, sampling=sampling)
        world.send(msgspec.structs.replace(asked, objective=Objective(e2e_ms=e2e_ms)))
    for _ in range(21):
        world.answer_one()
    return CellStats().measure(world.core, world.now)


@pytest.mark.parametrize(
    ("e2e_ms", "num_counted", "least", "most"),
    [(1e6, 36, 1.0, 1.0), (250.0, 36, 0.2, 0.8), (1.0, 0, 1.0, 1.0)],
)
def test_a_time_for_the_whole_answer_is_an_objective(
    e2e_ms: float, num_counted: int, least: float, most: float
) -> None:
    """Met, missed for the load, and one that an idle cell would miss as well."""
    stats = measured(e2e_ms)
    assert stats["objectives"] == num_counted
    assert least <= stats["attainment"] <= most
    assert stats["objective_tpot_s"] == pytest.approx(e2e_ms / 40 / 1e3 if num_counted else 0.0)


def test_nobody_who_waits_is_looked_for_in_the_queue() -> None:
    """It is done four times a second beside the steps: with 4000 in the queue, searches took 160 ms each."""
    world = World(1, "autoregressive")
    for number in range(40):
        world.send(msgspec.structs.replace(submit(number, world.rng), objective=Objective(ttft_ms=1e6)))
    queue = world.core.waiting = Queue(world.core.waiting)
    assert len(queue) > 20
    assert CellStats().measure(world.core, world.now)["objectives"] == 40
    assert queue.num_searches == 0


def test_tokens_per_second_are_those_of_the_scheduler_that_serves() -> None:
    """After a change of the policy another one does, which has counted others, or none."""
    before, after = World(1, "autoregressive"), World(1, "fixed")
    stats, rates = CellStats(), []
    for number in range(4):
        before.send(submit(number, before.rng))
    for now, core in ((0.0, before.core), (10.0, before.core), (11.0, after.core), (11.5, before.core)):
        rates.append(stats.measure(core, now)["tokens_per_s"])
        before.drain()
    assert rates == [0.0, before.core.totals.committed_tokens / 10.0, 0.0, 0.0]
    assert rates[1] > 0.0
