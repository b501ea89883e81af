"""Predicted time of a verify call as it is put together, and of the iterations a set of requests sustains."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from cluster.batching.base import BatchContext
from cluster.batching.common import tpot_s
from cluster.batching.slack import INFINITE, MARGIN, Pressure, expected_tokens
from cluster.cost_model import CostModel
from cluster.requests import Request

# Who could decode but was left out is in again after so many steps, whatever it costs the others.
DECODE_PATIENCE_STEPS = 4
LEAST_SHARE = 1.0 / DECODE_PATIENCE_STEPS
# Tokens per step that a request served by itself may hope for where there are drafters.
SOLO_TOKENS = 2.0


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


def alone_s(context: BatchContext) -> float:
    """Seconds of the shortest iteration there is: one request, nothing drafted."""
    return context.cost.verify_seconds(1, 1, 0) + context.cost.profile.overhead_s


@dataclass(slots=True)
class Sustained:
    """Whether the TPOT objectives of the running requests hold iteration after iteration.

    An iteration as long as the strictest of them allows must hold a decode of every request that needs
    one per iteration, and a share of a decode of every other: a utilisation test, as of periodic tasks on
    one processor. Requests without an objective, and those whose objective is out of reach, have the
    least share they are given in any case.

    Attributes:
        fixed_s: seconds of an iteration whatever the batch.
        each_s: seconds each request adds.
        num_committed: tokens an average request gets per decode.
        reach_s: the strictest TPOT objective that a request by itself may hope to meet.
        paces_s: seconds between two decodes that each request with an objective within reach allows.
        num_others: how many requests have none.
    """

    fixed_s: float
    each_s: float
    num_committed: float
    reach_s: float
    paces_s: list[float] = field(default_factory=list)
    num_others: int = 0
    _known: dict[float, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, running: Collection[Request], num_waiting: int, context: BatchContext) -> Sustained:
        """The running requests; with a queue behind them, prompts of those who follow are paid for too."""
        rows = context.num_rows
        num_context = sum(request.num_tokens for request in running)
        per_request = round(num_context / len(running)) if running else 0
        drafted = rows > 1.0
        one = context.cost.verify_seconds(1, round(rows), per_request, drafted=drafted)
        many = context.cost.verify_seconds(9, round(9 * rows), 9 * per_request, drafted=drafted)
        each_s = MARGIN * (many - one) / 8
        fixed_s = MARGIN * (one + context.beside_s) - each_s
        followed = min(1.0, num_waiting / max(1, len(running)))
        follow_s = MARGIN * followed * context.num_prefilled * context.cost.verify_token_seconds()
        reach_s = alone_s(context) / (SOLO_TOKENS if drafted else 1.0)
        sustained = cls(fixed_s, each_s + follow_s, context.num_committed, reach_s)
        least_s = alone_s(context)
        for request in running:
            pressure = Pressure.of(request, context)
            if pressure.limit_s(least_s) < INFINITE:
                sustained.paces_s.append(pressure.pace_s)
            else:
                sustained.num_others += 1
        return sustained

    def takes(self, request: Request) -> bool:
        """Whether the request can join and all keep their objectives, its own included."""
        pace_s = self._pace_s(request)
        if pace_s not in self._known:
            paces_s = self.paces_s if pace_s == INFINITE else [*self.paces_s, pace_s]
            num_others = self.num_others + (pace_s == INFINITE)
            period_s = min(paces_s, default=INFINITE)
            share = sum(max(LEAST_SHARE, period_s / pace) for pace in paces_s) + LEAST_SHARE * num_others
            self._known[pace_s] = self.fixed_s + self.each_s * share <= period_s
        return self._known[pace_s]

    def take(self, request: Request) -> None:
        """The request joins."""
        pace_s = self._pace_s(request)
        if pace_s == INFINITE:
            self.num_others += 1
        else:
            self.paces_s.append(pace_s)
        self._known.clear()

    def _pace_s(self, request: Request) -> float:
        """Infinite if its objective is out of reach even by itself: nothing is gained by heeding it."""
        if tpot_s(request) < self.reach_s:
            return INFINITE
        return tpot_s(request) * expected_tokens(request, self.num_committed)
