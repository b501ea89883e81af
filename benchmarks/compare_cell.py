"""The warm cell of a comparison: started once, its policy changed between runs, loaded in an open loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from benchmarks.cell_engine import CellEngine
from benchmarks.compare_load import CellLoad
from benchmarks.compare_plan import Entrant
from benchmarks.load_client import LoadResult, Outcome
from benchmarks.workload import BenchRequest
from cluster.config import FlotillaConfig

# A cell whose last request has ended is idle a moment later.
IDLE_TIMEOUT_S = 20.0
_COUNTERS = (
    "iterations",
    "step_s",
    "step_draft_s",
    "step_verify_s",
    "scheduler_s",
    "preemptions",
    "switches",
)


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Where the seconds of a run's decode steps went.

    Attributes:
        iterations: decode iterations.
        step_s: seconds of whole ones. step_draft_s, step_verify_s: of those, waiting for the slowest
            drafter, and the target's forward.
        scheduler_s: processor seconds of scheduling.
        preemptions: requests that gave up their KV. switches: changes of a request's drafter.
    """

    iterations: float
    step_s: float
    step_draft_s: float
    step_verify_s: float
    scheduler_s: float
    preemptions: float
    switches: float


class WarmCell(CellEngine):
    """A cell with all its drafters under Ray; the client is this process, as a front end would be.

    Args:
        config: the cell.
        end_tokens: what ends an answer.
        temperature: of every request; 0 is greedy.
        timeout_s: a request that has not ended so long after it was sent has failed.
    """

    def __init__(
        self, config: FlotillaConfig, end_tokens: Sequence[int], *, temperature: float, timeout_s: float
    ) -> None:
        super().__init__("compare", config, end_tokens)
        self._requests = CellLoad(self._client, end_tokens, temperature=temperature, timeout_s=timeout_s)

    def describe(self) -> dict[str, Any]:
        """What the cell says of itself."""
        description: dict[str, Any] = ray.get(self._cell.describe.remote())
        return description

    def set_policy(self, entrant: Entrant) -> None:
        """Change to a policy; waits until the cell is idle."""
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            try:
                ray.get(self._cell.set_policy.remote(dict(entrant.policy), dict(entrant.scheduler)))
            except RuntimeError:  # still busy, with requests that were given up
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return

    def totals(self) -> StepTotals:
        """Counters since the policy was first set."""
        stats = ray.get(self._cell.stats.remote())
        return StepTotals(**{name: float(stats[name]) for name in _COUNTERS})

    def load(
        self,
        requests: Sequence[BenchRequest],
        *,
        max_concurrency: int | None = None,
        on_done: Callable[[Outcome], None] | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> LoadResult:
        """As `CellLoad.run`, from outside its event loop."""
        load = self._requests.run(
            requests, max_concurrency=max_concurrency, on_done=on_done, on_tokens=on_tokens
        )
        return self._runner.run(load)
