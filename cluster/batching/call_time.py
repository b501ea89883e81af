"""Predicted time of a verify call as it is put together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.batching.base import BatchContext
from cluster.cost_model import CostModel
from cluster.requests import Request


@dataclass(slots=True)
class CallTime:
    """A verify call being put together; all counts are totals over it.

    Attributes:
        cost: forward-time model of the target.
        is_drafted: whether trees have more than their roots.
    """

    cost: CostModel
    is_drafted: bool = False
    num_requests: int = 0
    num_rows: float = 0.0
    num_context: int = 0
    num_attended: float = 0.0

    @classmethod
    def of(cls, requests: Sequence[Request], num_rows: int, context: BatchContext) -> CallTime:
        """A call that verifies trees of `num_rows` tokens together, and prefills nothing."""
        time = cls(context.cost, num_rows > len(requests), len(requests))
        rows, attended = 0.0, 0.0
        for request in requests:
            each, num_context = num_rows / len(requests), request.num_tokens
            rows += each
            attended += each * num_context
            time.num_context += num_context
        time.num_rows, time.num_attended = rows, attended
        return time

    def add(self, request: Request, num_rows: float, *, is_chunk: bool = False) -> None:
        """A tree of the request joins, or a chunk of its prompt."""
        self.num_requests += 1
        self.num_rows += num_rows
        if is_chunk:
            self.num_attended += num_rows * (request.num_computed + num_rows / 2)
        else:
            self.num_context += request.num_tokens
            self.num_attended += num_rows * request.num_tokens

    def seconds(self) -> float:
        """Predicted time of the target's forward."""
        return self._seconds(0, 0, 0.0)

    def seconds_with(self, request: Request, num_tokens: int) -> float:
        """The same with a chunk of the request's prompt on top."""
        return self._seconds(1, num_tokens, num_tokens * (request.num_computed + num_tokens / 2))

    def most_tokens(self, request: Request, most: int, seconds: float) -> int:
        """Largest chunk of the request's prompt, up to `most`, with which the call takes no longer."""
        sizes = range(1, most + 1)
        return bisect_right(sizes, seconds, key=lambda tokens: self.seconds_with(request, tokens))

    def _seconds(self, num_requests: int, num_tokens: int, num_attended: float) -> float:
        return self.cost.verify_seconds(
            self.num_requests + num_requests,
            round(self.num_rows) + num_tokens,
            self.num_context,
            drafted=self.is_drafted,
            num_attended=round(self.num_attended + num_attended),
        )
