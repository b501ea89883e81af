"""Requests sent straight to a cell, as a front end would, when they are due."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import aclosing

import numpy as np

from benchmarks.load_client import LoadResult, Outcome, send_when_due
from benchmarks.workload import BenchRequest
from cluster.stream_messages import Objective, Receipt, Submit
from deployments.cell_client import CellClient, CellLost, RequestRejected
from deployments.receipts import ChoiceOutcome, metrics
from engine.sampling_params import SamplingParams


def sampling_seed(prompt: Sequence[int]) -> int:
    """A seed that belongs to the prompt, so that every policy is asked for the same text."""
    return zlib.crc32(np.asarray(prompt, dtype=np.int32).tobytes())


class CellLoad:
    """Sends requests over a connection to a cell, and reads their streams to the end.

    Args:
        client: the connection.
        end_tokens: what ends an answer.
        temperature: of every request; 0 is greedy.
        timeout_s: a request that has not ended so long after it was sent has failed.
    """

    def __init__(
        self, client: CellClient, end_tokens: Sequence[int], *, temperature: float, timeout_s: float
    ) -> None:
        self._client = client
        self._end_tokens = tuple(end_tokens)
        self._temperature = temperature
        self._timeout_s = timeout_s
        self._num_sent = 0

    async def run(
        self,
        requests: Sequence[BenchRequest],
        *,
        max_concurrency: int | None = None,
        on_done: Callable[[Outcome], None] | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> LoadResult:
        """Send all requests when they are due, or as soon as the bound on concurrency admits them.

        Args:
            requests: with prompts as tokens.
            max_concurrency: a closed loop of so many; None sends at arrival times only.
            on_done: called with each outcome.
            on_tokens: called with the number of tokens that just arrived.
        """
        return await send_when_due(
            requests,
            lambda request, origin: self._send(request, origin, on_tokens),
            max_concurrency=max_concurrency,
            on_done=on_done,
        )

    async def _send(
        self, request: BenchRequest, origin: float, on_tokens: Callable[[int], None] | None
    ) -> Outcome:
        outcome = Outcome(request)
        start = time.perf_counter()
        outcome.sent_s = start - origin
        if request.arrival_s is not None:
            outcome.lag_ms = max(0.0, outcome.sent_s - request.arrival_s) * 1e3
        try:
            # Closed in any case: the cell must not go on with a request that was given up.
            events = self._client.submit(self._submission(request))
            async with asyncio.timeout(self._timeout_s), aclosing(events):
                async for event in events:
                    now_ms = (time.perf_counter() - start) * 1e3
                    if event.tokens:
                        outcome.token_ids += event.tokens
                        outcome.ttft_ms = now_ms if outcome.ttft_ms is None else outcome.ttft_ms
                        if on_tokens is not None:
                            on_tokens(len(event.tokens))
                    if event.finish_reason is not None:
                        self._finish(outcome, event.finish_reason, event.receipt, now_ms)
        except RequestRejected as error:
            outcome.error = f"{error.rejected.code}: {error}"
        except CellLost as error:
            outcome.error = str(error)
        except TimeoutError:
            outcome.error = f"no end within {self._timeout_s:g} s"
        return outcome

    def _submission(self, request: BenchRequest) -> Submit:
        self._num_sent += 1
        prompt = list(request.prompt.token_ids or ())
        return Submit(
            request_id=f"compare-{self._num_sent}",
            prompt=prompt,
            sampling=SamplingParams(
                temperature=self._temperature,
                max_tokens=request.max_tokens,
                seed=sampling_seed(prompt),
                stop_token_ids=self._end_tokens,
            ),
            objective=objective_of(request),
            tier=request.domain,
        )

    @staticmethod
    def _finish(outcome: Outcome, reason: str, receipt: Receipt | None, now_ms: float) -> None:
        outcome.e2e_ms, outcome.finish_reason = now_ms, reason
        outcome.num_output_tokens = len(outcome.token_ids)
        outcome.num_prompt_tokens = len(outcome.request.prompt.token_ids or ())
        if reason not in ("stop", "length"):
            outcome.error = f"ended as {reason!r}"
        choice = ChoiceOutcome(
            num_prompt_tokens=outcome.num_prompt_tokens,
            num_output_tokens=outcome.num_output_tokens,
            receipt=receipt,
            ttft_ms=outcome.ttft_ms,
            e2e_ms=now_ms,
            tpot_ms=outcome.tpot_ms,
        )
        outcome.metrics = metrics([choice], objective_of(outcome.request), seed=0)


def objective_of(request: BenchRequest) -> Objective:
    """All that a request is judged by, as the cell is told it."""
    slo = request.slo
    return Objective(tpot_ms=slo.tpot_ms, ttft_ms=slo.ttft_ms, e2e_ms=slo.e2e_ms)
