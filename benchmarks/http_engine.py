"""An OpenAI-compatible server as engine under test."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.engine_under_test import RunResult, Task
from benchmarks.load_client import LoadClient, LoadResult, Outcome, run_load
from benchmarks.prompts import Prompt
from benchmarks.workload import BenchRequest


class HttpEngine:
    """Sends token prompts in a closed loop; `extra` is merged into every body.

    With `reads_first` the prompts are asked for one token before a run, which is not measured: where two
    engines are one server, whoever comes second would else find read what the first had to read.

    Attributes:
        outcomes: every request of every run, by concurrency.
    """

    max_concurrency: int | None = None

    def __init__(
        self,
        name: str,
        url: str,
        model: str,
        extra: Mapping[str, Any] | None = None,
        *,
        reads_first: bool = False,
        api_key: str | None = None,
    ) -> None:
        self.name = name
        self._reads_first = reads_first
        self.outcomes: dict[int, list[Outcome]] = {}
        self._extra = dict(extra or {})
        self._runner = asyncio.Runner()
        sampling = {"temperature": 0.0, "return_token_ids": True}
        self._client = LoadClient(url, model, sampling=sampling, api_key=api_key)
        self._runner.run(self._client.__aenter__())

    def load(self, tasks: Sequence[Task], concurrency: int) -> LoadResult:
        """Send all tasks, and fail on the first that failed."""
        requests = [
            BenchRequest(
                index=place,
                prompt=Prompt(task.domain, token_ids=tuple(task.tokens)),
                max_tokens=task.max_tokens,
            )
            for place, task in enumerate(tasks)
        ]
        result = self._runner.run(
            run_load(self._client, requests, max_concurrency=concurrency, extra=self._extra)
        )
        failed = next((outcome for outcome in result.outcomes if not outcome.is_ok), None)
        if failed is not None:
            raise RuntimeError(f"{self.name}: {failed.error}")
        return result

    def run(self, tasks: Sequence[Task], concurrency: int) -> RunResult:
        """Continue all tasks, `concurrency` at a time."""
        if self._reads_first:
            self.load([replace(task, max_tokens=1) for task in tasks], concurrency)
        result = self.load(tasks, concurrency)
        self.outcomes.setdefault(concurrency, []).extend(result.outcomes)
        return RunResult(result.duration_s, [outcome.token_ids for outcome in result.outcomes])

    def close(self) -> None:
        """Close the connections."""
        self._runner.run(self._client.__aexit__(None, None, None))
        self._runner.close()
