"""What a cell says of the requests with objectives that it has: it is by this that cells are added."""

from __future__ import annotations

import msgspec
import pytest

from cluster.cell_stats import CellStats
from cluster.requests import Request
from cluster.scaling_config import CellScalingConfig
from cluster.stream_messages import Objective
from deployments.scaling_rules import overload
from engine.sampling_params import SamplingParams
from tests.cluster.simulated import submit
from tests.cluster.test_core import World

SCALING = CellScalingConfig(target_queue_ms=100)


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
    [(1e6, 36, 1.0, 1.0), (280.0, 36, 0.2, 0.8), (1.0, 0, 1.0, 1.0)],
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


def with_backlog(batching: str = "flotilla", *, num_with_objectives: int = 0, num_behind: int = 30) -> World:
    """A cell whose places and queue the background has filled, and perhaps some more requests."""
    world = World(1, "autoregressive", num_slots=4000, batching=batching)
    sampling = SamplingParams(temperature=0.0, max_tokens=100)
    for number in range(num_behind + num_with_objectives):
        asked = submit(number, world.rng, prompt=[number] * 8, sampling=sampling)
        if number < num_behind:
            world.send(msgspec.structs.replace(asked, priority=10))
        else:
            world.send(msgspec.structs.replace(asked, objective=Objective(tpot_ms=1e4)))
    for _ in range(40):
        world.answer_one()
    return world


def counting_all(world: World) -> dict[str, float]:
    """Of the same cell, were cells added for the background, too."""
    config, scaling = world.config, world.config.scaling
    cells = scaling.cells.model_copy(update={"for_background": True})
    changed = config.model_copy(update={"scaling": scaling.model_copy(update={"cells": cells})})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.core, "config", changed)
        return CellStats().measure(world.core, world.now)


def test_the_background_is_no_load_to_others() -> None:
    world = with_backlog()
    stats = CellStats().measure(world.core, world.now)
    assert stats["background_running"] == world.config.scheduler.max_running
    assert stats["background_waiting"] == 30 - stats["background_running"]
    assert (stats["running"], stats["waiting"], stats["queue_s"]) == (0, 0, 0)
    assert stats["kv_use"] == pytest.approx(0.0, abs=0.1)
    used = 1.0 - world.core.free_slots / stats["kv_slots"]
    assert stats["kv_use"] + stats["background_kv_use"] == pytest.approx(used)
    assert stats["background_kv_use"] > 0.01
    assert stats["background_queue_s"] > 0.1
    assert stats["tpot_s"] == stats["idle_tpot_s"]
    assert overload([stats], SCALING) < 0.2


def test_others_beside_the_background_count_as_they_would_without_it() -> None:
    beside, alone = with_backlog(num_with_objectives=4), with_backlog(num_with_objectives=4, num_behind=0)
    stats, expected = (CellStats().measure(world.core, world.now) for world in (beside, alone))
    for name in ("running", "waiting", "objectives", "attainment", "objective_tpot_s"):
        assert stats[name] == expected[name], name
    assert stats["running"] == 4
    assert stats["background_running"] > 0
    assert stats["kv_use"] == pytest.approx(expected["kv_use"], abs=0.1)
    assert stats["queue_s"] == pytest.approx(expected["queue_s"])
    assert 0.0 < stats["tpot_s"] < counting_all(beside)["tpot_s"]


def test_of_prompts_that_are_shared_the_background_has_its_part_only() -> None:
    """Counted with each of it they were more than all that is in use, and others seemed to use nothing."""
    world = with_backlog(num_with_objectives=4)
    running = world.core.running.values()
    held = sum(request.num_computed for request in running)
    others = sum(request.num_computed for request in running if request.submit.priority == 0)
    num_slots = world.target.num_slots
    world.core.free_slots = num_slots - held // 3
    stats = CellStats().measure(world.core, world.now)
    assert stats["kv_use"] == pytest.approx(held // 3 / num_slots * others / held)
    assert stats["kv_use"] + stats["background_kv_use"] == pytest.approx(held // 3 / num_slots)


def test_a_backlog_counts_where_the_configuration_says_so_or_there_is_no_background() -> None:
    plain = with_backlog("sarathi")
    for stats in (counting_all(with_backlog()), CellStats().measure(plain.core, plain.now)):
        assert stats["running"] == plain.config.scheduler.max_running
        assert stats["background_running"] == stats["background_waiting"] == stats["background_kv_use"] == 0
        assert stats["queue_s"] == stats["background_queue_s"] > 0.1
        assert overload([stats], SCALING) > 1.0
