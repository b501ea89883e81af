"""The warm cell of a comparison of drafter pools: one cell, its selector changed between runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import ray

from benchmarks import demo
from benchmarks.cell_engine import CellEngine
from benchmarks.engine_under_test import Task
from benchmarks.local_engine import submission
from cluster.config import FlotillaConfig
from cluster.stream_messages import Receipt, Speculation

IDLE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Served:
    """What one request got: its tokens, the cell's receipt, and seconds from sending it to its end."""

    tokens: list[int]
    receipt: Receipt
    seconds: float


class PoolCell(CellEngine):
    """A cell that keeps nothing of what it was asked, for it is asked the same prompts again and again."""

    def __init__(self, config: FlotillaConfig, end_tokens: Sequence[int]) -> None:
        super().__init__("pool", demo.keeping_nothing(config), end_tokens)

    def set_selector(self, selector: dict[str, Any]) -> None:
        """Change to a selector, or back to one that then goes on with what it had learnt."""
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            try:
                ray.get(self._cell.set_policy.remote({}, {}, selector))
            except RuntimeError:  # a drafter may still be scored on a request that has ended
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return

    def stats(self) -> dict[str, float]:
        """Counters since the selector was first set."""
        stats: dict[str, float] = ray.get(self._cell.stats.remote())
        return stats

    def serve(
        self, tasks: Sequence[Task], wishes: Sequence[Speculation], concurrency: int
    ) -> tuple[float, list[Served]]:
        """Continue all tasks in a closed loop; seconds of it all, and what each got, in order."""
        return self._runner.run(self._serve(tasks, wishes, concurrency))

    async def _serve(
        self, tasks: Sequence[Task], wishes: Sequence[Speculation], concurrency: int
    ) -> tuple[float, list[Served]]:
        bound = asyncio.Semaphore(concurrency)

        async def one(task: Task, wish: Speculation) -> Served:
            request = msgspec.structs.replace(
                submission(task, self._end_tokens), speculation=wish, tier=task.domain
            )
            tokens: list[int] = []
            receipt: Receipt | None = None
            async with bound:
                start = time.perf_counter()
                async for event in self._client.submit(request):
                    tokens += event.tokens
                    receipt = event.receipt or receipt
                seconds = time.perf_counter() - start
            assert receipt is not None, "a stream ends with its receipt"
            return Served(tokens, receipt, seconds)

        start = time.perf_counter()
        served = await asyncio.gather(*map(one, tasks, wishes))
        return time.perf_counter() - start, list(served)
