"""Predicted time of a verify call as it is put together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.batching.base import BatchContext
from cluster.call_parts import NO_ROWS, Rows, chunk_rows
from cluster.cost_model import CostModel
from cluster.requests import Request


@dataclass(slots=True)
class CallTime:
    """A verify call being put together.

    Attributes:
        cost: forward-time model of the target.
        is_drafted: whether trees have more than their roots.
        decoding, prompts: its rows.
    """

    cost: CostModel
    is_drafted: bool = False
    decoding: Rows = NO_ROWS
    prompts: Rows = NO_ROWS

    @classmethod
    def of(cls, requests: Sequence[Request], num_rows: int, context: BatchContext) -> CallTime:
        """A call that verifies trees of `num_rows` tokens together, and prefills nothing."""
        if not requests:
            return cls(context.cost)
        num_context = sum([request.num_tokens for request in requests])
        decoding = Rows(len(requests), num_rows, num_context, num_rows * num_context / len(requests))
        return cls(context.cost, num_rows > len(requests), decoding)

    def add(self, request: Request, num_rows: float, *, is_chunk: bool = False) -> None:
        """A tree of the request joins, or a chunk of its prompt."""
        if is_chunk:
            self.prompts = self.prompts.with_rows(chunk_rows(request.num_computed, num_rows))
        else:
            num_context = request.num_tokens
            self.decoding = self.decoding.with_rows(Rows(1, num_rows, num_context, num_rows * num_context))

    def seconds(self) -> float:
        """Predicted time of the target's forward."""
        return self._seconds(self.prompts)

    def seconds_with(self, request: Request, num_tokens: int) -> float:
        """The same with a chunk of the request's prompt on top."""
        return self._seconds(self.prompts.with_rows(chunk_rows(request.num_computed, num_tokens)))

    def most_tokens(self, request: Request, most: int, seconds: float) -> int:
        """Largest chunk of the request's prompt, up to `most`, with which the call takes no longer."""
        sizes = range(1, most + 1)
        return bisect_right(sizes, seconds, key=lambda tokens: self.seconds_with(request, tokens))

    def _seconds(self, prompts: Rows) -> float:
        return self.cost.call_parts(self.decoding, prompts, drafted=self.is_drafted).seconds
