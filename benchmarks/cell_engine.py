"""A real cell under Ray, measured through its token stream, as engine under test."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from benchmarks.engine_under_test import RunResult, Task
from benchmarks.local_engine import submission
from cluster.cell import Cell
from cluster.config import FlotillaConfig
from cluster.priority import use_ordinary_priority
from cluster.process_environment import take_on
from deployments.cell_client import CellClient

READY_TIMEOUT_S = 300.0


def start_ray(num_cpus: int = 64) -> None:
    """A private local Ray, unless one is connected already.

    Logical CPUs are plentiful on purpose: several cells are loaded side by side, and only one of them
    works at a time.
    """
    if ray.is_initialized():
        return
    root = str(Path(__file__).resolve().parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    take_on()
    use_ordinary_priority()
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)


class CellEngine:
    """One cell with its worker processes; the client is this process, as a front end would be."""

    max_concurrency: int | None = None

    def __init__(self, name: str, config: FlotillaConfig, end_tokens: Sequence[int]) -> None:
        start_ray()
        self.name = name
        self._end_tokens = tuple(end_tokens)
        self._runner = asyncio.Runner()
        cell: Any = ray.remote(Cell)
        self._cell = cell.options(num_cpus=0, max_restarts=0).remote(config)
        self._runner.run(self._wait_until_ready())

        async def locate() -> tuple[str, int, str]:
            host, port, token = await self._cell.endpoint.remote()
            return host, port, token

        self._client = CellClient(locate)

    async def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            state = await self._cell.describe.remote()
            if state["failure"]:
                raise RuntimeError(f"{self.name}: {state['failure']}")
            # Making the process in reserve takes seconds of a core, which the first round would lack.
            if state["ready"] and not state["making_standby"]:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name}: still {state['stage']} after {READY_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.1)

    def run(self, tasks: Sequence[Task], concurrency: int) -> RunResult:
        """Continue all tasks in a closed loop of `concurrency` requests."""
        before = ray.get(self._cell.stats.remote())
        seconds, outputs = self._runner.run(self._load(tasks, concurrency))
        after = ray.get(self._cell.stats.remote())
        return RunResult(
            seconds,
            outputs,
            step_s=after["iteration_s"] - before["iteration_s"],
            scheduler_s=after["scheduler_s"] - before["scheduler_s"],
        )

    async def _load(self, tasks: Sequence[Task], concurrency: int) -> tuple[float, list[list[int]]]:
        bound = asyncio.Semaphore(concurrency)

        async def one(task: Task) -> list[int]:
            request = submission(task, self._end_tokens)
            tokens: list[int] = []
            async with bound:
                async for event in self._client.submit(request):
                    tokens += event.tokens
            return tokens

        start = time.perf_counter()
        outputs = await asyncio.gather(*map(one, tasks))
        return time.perf_counter() - start, list(outputs)

    def close(self) -> None:
        """End the cell's processes."""
        self._runner.run(self._client.close())
        self._runner.close()
        ray.kill(self._cell)
