"""What a simulated cell tells of its load, against what then happens: cells are chosen and added by it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from cluster.cell_stats import CellStats
from cluster.events import RequestArrived
from cluster.scaling_config import CellScalingConfig
from cluster.stream_messages import Objective
from deployments.scaling_rules import Memory, desired_cells, overload_with
from simulator import hardware, workloads
from simulator.run import Cell, Options
from simulator.systems import Bounds, parse
from simulator.workloads import SimRequest

# A cell of it takes 15 ms per token with 64 requests, and 2 ms with one.
PROFILE = hardware.load("llama-8b-h200-served")


class ToldCell(Cell):
    """Tells of its load whenever a request comes.

    Attributes:
        told: by the id of the request that came.
        waited_s: from when a request came until it had a place.
    """

    def __init__(self, system: str, max_running: int, num_slots: int = PROFILE.num_slots) -> None:
        profile = msgspec.structs.replace(PROFILE, num_slots=num_slots)
        super().__init__(profile, parse(system, Bounds(max_running=max_running)), Options(seed=1))
        self.stats = CellStats()
        self.told: dict[str, dict[str, float]] = {}
        self.waited_s: dict[str, float] = {}
        self._num_told = 0

    def serve(self, until: float) -> None:
        """Let everything happen that is due by then."""
        while self.clock and self.clock.due <= until:
            event = self._take_due()
            if event is None:
                continue
            if isinstance(event, RequestArrived):
                for _, receipt in list(self.receipts.values())[self._num_told :]:
                    self.stats.ended(receipt.num_output_tokens)
                self._num_told = len(self.receipts)
                self.told[event.submit.request_id] = self.stats.measure(self.core, self.clock.now)
            self._handle(event)
            for request in self.core.running.values():
                self.waited_s.setdefault(request.request_id, self.clock.now - request.arrived)


def loaded(policy: str, tpot_ms: float) -> tuple[dict[str, float], float]:
    """What is told with 64 requests that have an objective, and what the request before took alone."""
    cell = ToldCell(f"{policy}/flotilla", 64)
    cell.submit(SimRequest("alone", "code", 0.0, 100, 200, Objective(), seed=1))
    for number in range(64):
        cell.submit(
            SimRequest(f"r{number}", "code", 5.0, 100, 400, Objective(tpot_ms=tpot_ms), seed=2 + number)
        )
    cell.serve(8.0)
    assert len(cell.core.running) == 64
    alone_ms = cell.receipts["alone"][1].tpot_ms
    assert alone_ms is not None
    return cell.stats.measure(cell.core, 8.0), alone_ms / 1e3


@pytest.mark.parametrize("policy", ["flotilla", "autoregressive"])
def test_a_loaded_cell_knows_what_a_request_alone_would_take(policy: str) -> None:
    """Told by present steps it was five times as much: objectives that all miss counted as out of reach."""
    stats, alone_s = loaded(policy, tpot_ms=9.0)
    assert stats["idle_tpot_s"] == pytest.approx(alone_s, rel=0.25)
    assert stats["tpot_s"] > 9e-3
    assert stats["objectives"] == 64
    assert stats["attainment"] < 0.2
    config = CellScalingConfig(max=4, upscale_delay_s=0.0)
    assert desired_cells([stats], 1, 0.0, config, Memory())[0] == 2
    # One cell cannot bear what two such bear.
    assert overload_with([stats, stats], 1, config) == float("inf")


def told_over_waited(cell: ToldCell, count: int, rate: float, num_waiting: int) -> list[float]:
    """Of those that came when more than so many waited, what they were told over what they waited."""
    shapes = [replace(one, num_prompt=min(one.num_prompt, 300)) for one in workloads.synthetic(count, 1)]
    for request in workloads.arrive(shapes, 6e-3, rate=rate, seed=1):
        # It says little of how long an answer will be.
        most = max(1024, request.num_output)
        cell.submit(replace(request, objective=Objective(), max_tokens=most))
    cell.serve(60.0)
    late = [name for name in cell.waited_s if cell.told[name]["waiting"] > num_waiting]
    assert len(late) > 100
    return [cell.told[name]["queue_s"] / cell.waited_s[name] for name in late]


def test_a_queue_takes_as_long_as_is_told() -> None:
    """By what those who run have left, and not by how long answers are, half of that was told."""
    ratios = told_over_waited(ToldCell("flotilla", 48), 450, 30.0, 40)
    assert 0.8 < np.median(ratios) < 1.25


@pytest.mark.parametrize("system", ["flotilla", "autoregressive/sarathi"])
def test_who_waits_for_memory_waits_for_others_to_end(system: str) -> None:
    """Places were free, so only the prompts before it counted: half of the wait, and at first a tenth."""
    cell = ToldCell(system, 64, num_slots=6000)
    ratios = told_over_waited(cell, 250, 20.0, 10)
    assert max(stats["running"] for stats in cell.told.values()) < 40
    assert 0.7 < np.median(ratios) < 1.4


def test_a_new_cell_tells_of_a_queue_before_answers_have_ended() -> None:
    """Answers of 230 tokens were taken to have 64 until some 50 had ended: a third of the queue was told."""
    ratios = told_over_waited(ToldCell("flotilla", 48), 250, 120.0, 20)
    assert 0.5 < np.median(ratios) < 1.25


def test_a_backlog_ends_at_the_pace_that_there_is() -> None:
    """Not at that of a cell without it, which would be several times as fast."""
    cell = ToldCell("autoregressive/flotilla", 64)
    for number in range(400):
        at_s, length = 0.02 * number, 200 + number % 100
        cell.submit(SimRequest(f"r{number}", "code", at_s, 50, length, Objective(), seed=number, priority=10))
    cell.serve(60.0)
    late = [f"r{number}" for number in range(300, 400)]  # how long answers are is known by then
    assert all(cell.told[name]["background_waiting"] > 30 for name in late)
    ratios = [cell.told[name]["background_queue_s"] / cell.waited_s[name] for name in late]
    assert 0.7 < np.median(ratios) < 1.3
    assert all(stats["queue_s"] == 0.0 for stats in cell.told.values())
