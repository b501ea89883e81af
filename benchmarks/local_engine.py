"""This engine in one process, as engine under test."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch

from benchmarks.engine_under_test import RunResult, Task
from cluster.config import FlotillaConfig
from cluster.local import LocalEngine
from cluster.stream_messages import Objective, Submit
from engine.sampling_params import SamplingParams

_ids = itertools.count()


def submission(task: Task, end_tokens: Sequence[int], objective: Objective | None = None) -> Submit:
    """A greedy request for a task."""
    return Submit(
        request_id=f"bench-{next(_ids)}",
        prompt=list(task.tokens),
        sampling=SamplingParams(
            temperature=0.0, max_tokens=task.max_tokens, stop_token_ids=tuple(end_tokens)
        ),
        objective=objective or Objective(),
    )


def with_concurrency(config: FlotillaConfig, concurrency: int) -> FlotillaConfig:
    """The configuration that decodes so many at once, and lets any number wait."""
    scheduler = config.scheduler.model_copy(update={"max_running": concurrency, "max_waiting": 1 << 20})
    return config.model_copy(update={"scheduler": scheduler})


def without_speculation(config: FlotillaConfig) -> FlotillaConfig:
    """The same cell without drafters."""
    policy = config.policy.model_copy(update={"name": "autoregressive"})
    return config.model_copy(update={"policy": policy, "drafters": ()})


class InProcessEngine:
    """`cluster.local` with one thread; drafting and verification take turns on one core."""

    max_concurrency: int | None = None

    def __init__(self, name: str, config: FlotillaConfig, end_tokens: Sequence[int]) -> None:
        self.name = name
        self._end_tokens = tuple(end_tokens)
        self._engine = LocalEngine(config)
        self._concurrency = 0

    def run(self, tasks: Sequence[Task], concurrency: int) -> RunResult:
        """Continue all tasks, `concurrency` at a time."""
        torch.set_num_threads(1)
        engine = self._engine
        if concurrency != self._concurrency:
            engine.use_policy(with_concurrency(engine.config, concurrency))
            self._concurrency = concurrency
        requests = [submission(task, self._end_tokens) for task in tasks]
        stats = engine.stats
        scheduler_before, work_before = stats.scheduler_s, stats.draft_s + stats.verify_s
        start = time.perf_counter()
        completions = engine.generate(requests)
        seconds = time.perf_counter() - start
        scheduler = stats.scheduler_s - scheduler_before
        return RunResult(
            seconds,
            [completions[request.request_id].tokens for request in requests],
            step_s=stats.draft_s + stats.verify_s - work_before + scheduler,
            scheduler_s=scheduler,
        )

    def close(self) -> None:
        """Nothing runs between calls."""
