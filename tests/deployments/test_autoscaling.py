"""The number of cells and front ends on fake time, over cells that queue by a simple law."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scaling_config import CellScalingConfig, FrontEndScalingConfig
from deployments.autoscaling import CellPolicy
from deployments.scaling_rules import Memory, desired_cells, desired_front_ends, overload, overload_with
from tests.examples import examples

CONFIG = CellScalingConfig(min=1, max=4, upscale_delay_s=2.0, downscale_delay_s=10.0)
STEP_S = 0.5
IDLE_TPOT_S, PER_REQUEST_S, PLACES = 0.010, 0.001, 40
TPOT_OBJECTIVE_S = 0.030


class Cells:
    """Cells that share arrivals evenly: time per token grows with the batch, who finds no place queues.

    Args:
        start_s: seconds until an added cell serves.
    """

    def __init__(self, start_s: float = 3.0) -> None:
        self.start_s = start_s
        self.ready_at = [0.0]
        self.queue = 0.0
        self.now = 0.0
        self.memory = Memory()

    @property
    def number(self) -> int:
        return len(self.ready_at)

    def stats(self, tokens_per_s: float) -> list[dict[str, float]]:
        serving = [at for at in self.ready_at if at <= self.now]
        rate = tokens_per_s / len(serving)
        share = rate * PER_REQUEST_S
        batch = PLACES if share >= 1 or self.queue > 0 else min(PLACES, rate * IDLE_TPOT_S / (1 - share))
        tpot_s = IDLE_TPOT_S + PER_REQUEST_S * batch
        capacity = batch / tpot_s
        # Requests of 100 tokens that nobody has a place for.
        if batch == PLACES:
            self.queue = max(0.0, self.queue + (rate - capacity) * len(serving) * STEP_S / 100)
        waiting = self.queue / len(serving)
        return [
            {
                "ready": 1.0,
                "running": batch,
                "waiting": waiting,
                "max_running": float(PLACES),
                "kv_use": batch / PLACES / 2,
                "queue_s": waiting * 100 / capacity if capacity else 0.0,
                "tpot_s": tpot_s,
                "idle_tpot_s": IDLE_TPOT_S,
                "objectives": batch,
                "attainment": float(tpot_s <= TPOT_OBJECTIVE_S),
                "objective_tpot_s": TPOT_OBJECTIVE_S if batch else 0.0,
            }
            for _ in serving
        ]

    def look(self, tokens_per_s: float, config: CellScalingConfig = CONFIG) -> int:
        stats = self.stats(tokens_per_s)
        wanted, self.memory = desired_cells(stats, self.number, self.now, config, self.memory)
        while wanted > self.number:
            self.ready_at.append(self.now + self.start_s)
        while wanted < self.number:
            self.ready_at.pop()
        self.now += STEP_S
        return self.number

    def run(self, tokens_per_s: Callable[[float], float], seconds: float) -> list[int]:
        return [self.look(tokens_per_s(self.now)) for _ in range(int(seconds / STEP_S))]


def test_a_burst_adds_cells_and_its_decay_removes_them() -> None:
    cells = Cells()
    found = cells.run(lambda now: 2600.0 if 20 <= now < 120 else 100.0, 400)
    assert set(found[:40]) == {1}
    assert found[int(23 / STEP_S)] == 2, "too late after a burst"
    assert max(found) >= 3
    at_burst_end = found[int(119 / STEP_S)]
    assert at_burst_end >= 3
    assert found[-1] == 1
    later = found[int(120 / STEP_S) :]
    assert later == sorted(later, reverse=True), "cells were added again while the load fell"


def test_they_are_removed_one_by_one_with_a_pause_between() -> None:
    cells = Cells()
    cells.ready_at = [0.0] * 4
    found = cells.run(lambda _: 50.0, 60)
    changes = [index for index in range(1, len(found)) if found[index] != found[index - 1]]
    assert [found[index] for index in changes] == [3, 2, 1]
    assert all(b - a >= CONFIG.downscale_delay_s / STEP_S for a, b in pairwise(changes))


@examples(60)
@given(st.floats(0, 3500), st.integers(1, 4))
def test_a_steady_load_finds_a_number_that_stays(tokens_per_s: float, number: int) -> None:
    cells = Cells()
    cells.ready_at = [0.0] * number
    found = cells.run(lambda _: tokens_per_s, 300)
    settled = found[len(found) // 2 :]
    assert len(set(settled)) == 1, "it oscillates"


@examples(60)
@given(st.lists(st.floats(0, 5000), min_size=10, max_size=120), st.integers(1, 3))
def test_bounds_hold_and_steps_are_small_whatever_comes(loads: list[float], step: int) -> None:
    config = CONFIG.model_copy(update={"max_step": step})
    cells, before = Cells(start_s=0.0), 1
    for load in loads:
        now = cells.look(load, config)
        assert 1 <= now <= 4
        assert -1 <= now - before <= step
        before = now


@examples(60)
@given(st.floats(800, 5000))
def test_overload_is_answered_within_the_delay(tokens_per_s: float) -> None:
    cells = Cells()
    found = []
    overloaded_at = None
    for _ in range(200):
        stats = Cells.stats(cells, tokens_per_s)
        if overloaded_at is None and overload(stats, CONFIG) > 1.0:
            overloaded_at = cells.now
        found.append(cells.look(tokens_per_s))
        if overloaded_at is not None and cells.now - overloaded_at > CONFIG.upscale_delay_s + 2 * STEP_S:
            break
    assert overloaded_at is not None
    assert found[-1] >= 2


def test_a_spike_shorter_than_the_delay_changes_nothing() -> None:
    cells = Cells()
    assert set(cells.run(lambda now: 900.0 if now % 10 < 1.0 else 50.0, 100)) == {1}


def test_a_cell_that_never_starts_is_given_up_when_the_load_is_gone() -> None:
    memory, wanted, idle = Memory(), 2, {"ready": 1.0, "max_running": 40.0}
    for second in range(30):
        wanted, memory = desired_cells([idle], wanted, float(second), CONFIG, memory)
        assert wanted == (2 if second < CONFIG.downscale_delay_s else 1)


def test_nothing_changes_while_a_cell_starts() -> None:
    busy = {"ready": 1.0, "running": 40.0, "queue_s": 9.0, "max_running": 40.0}
    for cells in ([busy], [busy, {**busy, "ready": 0.0}], []):
        memory, now = Memory(), 0.0
        for _ in range(100):
            wanted, memory = desired_cells(cells, 2, now, CONFIG, memory)
            now += 1.0
            assert wanted == 2


@given(st.floats(1, 2500), st.integers(2, 6))
def test_what_is_predicted_for_fewer_cells_is_what_they_then_have(tokens_per_s: float, number: int) -> None:
    """Against the law of `Cells`, which is the law the prediction assumes, where nobody queues."""
    cells = Cells()
    cells.ready_at = [0.0] * number
    before = cells.stats(tokens_per_s)
    predicted = overload_with(before, number - 1, CONFIG)
    cells.ready_at.pop()
    (after, *_) = cells.stats(tokens_per_s)
    if after["running"] >= PLACES:
        assert predicted >= 0.99
        return
    headroom = (after["tpot_s"] - IDLE_TPOT_S) / (TPOT_OBJECTIVE_S - IDLE_TPOT_S)
    expected = max(after["running"] / PLACES, after["kv_use"] / CONFIG.kv_high, headroom)
    assert predicted == pytest.approx(expected, rel=1e-6)


def test_nobody_can_be_fewer_than_one() -> None:
    assert overload_with([{"ready": 1.0}], 0, CONFIG) == math.inf


@examples(60)
@given(st.integers(0, 600))
def test_front_ends_settle_by_streams(streams: int) -> None:
    config = FrontEndScalingConfig(max=8, streams_per_replica=64, upscale_delay_s=1, downscale_delay_s=5)
    number, memory, found = 1, Memory(), []
    for index in range(200):
        number, memory = desired_front_ends([float(streams)], number, index * STEP_S, 1, config, memory)
        found.append(number)
    assert len(set(found[100:])) == 1
    assert found[-1] >= min(8, math.ceil(streams / 64))
    assert found[-1] <= max(1, math.ceil(1.25 * streams / 64))


def test_serves_policy_keeps_its_memory_in_the_context() -> None:
    """With Serve's own context class; that Serve calls it is shown by `flotilla bench scaling`."""
    from ray.serve.config import AutoscalingContext

    policy = CellPolicy(**CONFIG.model_dump())
    state: dict[str, object] = {"serve_has_its_own": 1}
    wanted = []
    for second in range(4):
        context = AutoscalingContext(
            deployment_id=None,
            deployment_name="Cell",
            app_name="flotilla",
            current_num_replicas=1,
            target_num_replicas=1,
            running_replicas=[],
            total_num_requests=0,
            total_queued_requests=0,
            aggregated_metrics={"queue_s": {"replica": 3.0}, "ready": {"replica": 1.0}},
            raw_metrics=None,
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=4,
            policy_state=state,
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=float(second),
            config=None,
        )
        number, state = policy(context)
        wanted.append(number)
    assert wanted == [1, 1, 2, 1]


@given(st.integers(2, 30), st.integers(1, 12), st.floats(0.0, 60.0), st.floats(0.0, 0.5))
def test_as_many_are_removed_at_once_as_may_be_and_as_the_others_can_spare(
    current: int, most: int, running: float, queue_s: float
) -> None:
    config = CellScalingConfig(min=1, max=30, downscale_delay_s=0.0, max_step_down=most)
    tpot_s = IDLE_TPOT_S + PER_REQUEST_S * running
    stats = {"running": running, "max_running": 64.0, "tpot_s": tpot_s, "idle_tpot_s": IDLE_TPOT_S}
    stats |= {"queue_s": queue_s, "objective_tpot_s": TPOT_OBJECTIVE_S}
    cells = [stats] * current
    spared = [
        number
        for number in range(1, min(most, current - 1) + 1)
        if overload_with(cells, current - number, config) < config.low_load
    ]
    wanted, _ = desired_cells(cells, current, 100.0, config, Memory())
    expected = current - max(spared, default=0) if overload(cells, config) <= 1.0 else wanted
    assert wanted == expected


def test_a_clock_that_is_put_back_stops_nothing() -> None:
    """Ray Serve passes the time of day: an hour back, and for an hour no cell was added."""
    cell = {"ready": 1.0, "queue_s": 5.0, "running": 40.0, "max_running": 40.0}
    _, memory = desired_cells([cell], 1, 10_000.0, CONFIG, Memory(changed_at=9_999.0))
    numbers = []
    for look in range(10):
        wanted, memory = desired_cells([cell], 1, 6_400.0 + look, CONFIG, memory)
        numbers.append(wanted)
    assert 2 in numbers
