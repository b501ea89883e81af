"""How many micro-batches: predicted goodput of a pipeline of drafters and target (SPIN, 2025, section V-B).

While the target verifies one micro-batch, drafters draft for the next. Every forward has a part that does not
depend on its size, so each further micro-batch costs the target time; one that is there in time saves it the
wait for drafts. Nothing here knows requests or workers: sizes and costs in, a number out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cluster.cost_model import PER_CALL, VERIFY, CostModel
from cluster.policies.base import DecodeRequest

MOST_MICRO_BATCHES = 8
# A micro-batch has at least so many requests, and up to so many requests all share one: drafting ahead
# (docs/decisions/0011) overlaps as much and splits nothing.
LEAST_REQUESTS = 2
FEW_REQUESTS = 4
# SPIN splits further until predicted throughput drops by more than this from the best so far.
NOTICEABLE = 0.03
# The count is looked at again after so many verify calls; another one must promise this much more.
REVIEW_CALLS = 24
HYSTERESIS = 0.03
# Weight of the newest review in what was measured of a count, and the share of it forgotten in every review
# in which another count ran: a count that disappointed is tried again some time.
SMOOTHING = 0.4
FORGOTTEN = 0.01
# A change of load by this factor begins measuring, and looking, anew.
LOAD_CHANGE = 1.3


@dataclass(frozen=True, slots=True)
class Load:
    """What is decoded.

    Attributes:
        by_drafter: requests and their context tokens, by drafter; "" are those who draft nothing.
        rate: mean acceptance rate of those with a drafter.
    """

    by_drafter: Mapping[str, tuple[int, int]]
    rate: float

    @classmethod
    def of(cls, batch: Sequence[DecodeRequest]) -> Load:
        """The load that requests make, as a policy sees them."""
        by_drafter: dict[str, tuple[int, int]] = {}
        rates = []
        for request in batch:
            count, context = by_drafter.get(request.drafter, (0, 0))
            by_drafter[request.drafter] = (count + 1, context + request.num_context)
            if request.drafter:
                rates.append(request.rate)
        return cls(by_drafter, sum(rates) / len(rates) if rates else 0.0)

    @property
    def num_requests(self) -> int:
        """All requests."""
        return sum(count for count, _ in self.by_drafter.values())

    @property
    def num_drafting(self) -> int:
        """Requests that have a drafter."""
        return self.num_requests - self.by_drafter.get("", (0, 0))[0]

    @property
    def num_context(self) -> int:
        """Context tokens of all."""
        return sum(context for _, context in self.by_drafter.values())


@dataclass(frozen=True, slots=True)
class Prediction:
    """One round of the pipeline: every request is drafted for and verified once.

    Attributes:
        count: micro-batches.
        depth: of the drafts; 0 is plain decoding.
        seconds: of the round.
        tokens: committed in it, expected.
        idle_s: of its seconds, those in which the target waits for drafts or messages.
    """

    count: int
    depth: int
    seconds: float
    tokens: float
    idle_s: float

    @property
    def goodput(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the pipeline runs.

    Attributes:
        cost: forward times of target and drafters.
        drafters_at_once: drafters that compute at the same time; further ones share cores with these.
        max_depth: deepest draft.
    """

    cost: CostModel
    drafters_at_once: int = 1
    max_depth: int = 8

    def predict(self, load: Load, count: int, depth: int) -> Prediction:
        """A round of `count` equal micro-batches with drafts of `depth`.

        It lasts as long as the busiest of three: the target, which verifies one after the other; a
        micro-batch by itself, which is drafted, sent and verified; and the cores that draft for all.
        """
        n, overhead_s = load.num_requests, self.cost.profile.overhead_s
        if depth == 0 or not load.num_drafting:
            seconds = self._verify_s(load, 1, 0) + overhead_s / 2
            return Prediction(1, 0, seconds, float(n), overhead_s / 2)
        verify_s = self._verify_s(load, count, depth)
        slowest_s = work_s = 0.0
        for name, (requests, context) in load.by_drafter.items():
            if not name:
                continue
            parts = min(count, requests)
            call_s = self.cost.draft_seconds(name, -(-requests // parts), 1, depth, context // parts)
            slowest_s = max(slowest_s, call_s)
            work_s += parts * call_s
        work_s /= self.drafters_at_once
        alone_s = max(slowest_s, work_s / count) + verify_s + overhead_s
        # With several, the next call is at the target before it is done with the one before.
        seconds = max(count * verify_s, alone_s, work_s)
        tokens = n + load.num_drafting * sum(load.rate**layer for layer in range(1, depth + 1))
        return Prediction(count, depth, seconds, tokens, seconds - count * verify_s)

    def best(self, load: Load, count: int) -> Prediction:
        """The depth that promises most; goodput rises to one peak (SpecServe), so the first fall ends it."""
        best = self.predict(load, count, 1)
        for depth in range(2, self.max_depth + 1):
            prediction = self.predict(load, count, depth)
            if prediction.goodput <= best.goodput:
                break
            best = prediction
        plain = self.predict(load, 1, 0)
        return plain if count == 1 and plain.goodput >= best.goodput else best

    def _verify_s(self, load: Load, count: int, depth: int) -> float:
        n, drafting, context = load.num_requests, load.num_drafting, load.num_context
        rows = n + depth * drafting
        # Fractions of a request are rounded up: the largest micro-batch is meant.
        return self.cost.verify_seconds(
            -(-n // count), -(-rows // count), context // count, drafted=depth > 0
        )


def most_micro_batches(num_requests: int) -> int:
    """How many there may be of so many requests."""
    if num_requests <= FEW_REQUESTS:
        return 1
    return max(1, min(MOST_MICRO_BATCHES, num_requests // LEAST_REQUESTS))


def spin_count(machine: Machine, load: Load) -> int:
    """SPIN's heuristic: from two micro-batches on, split further until predicted throughput drops noticeably.

    One if two are already noticeably worse, or if nothing is drafted.
    """
    if not load.num_drafting:
        return 1
    best = machine.best(load, 1).goodput
    chosen = 1
    for count in range(2, most_micro_batches(load.num_requests) + 1):
        goodput = machine.best(load, count).goodput
        if goodput < (1.0 - NOTICEABLE) * best:
            break
        best, chosen = max(best, goodput), count
    return chosen


class CountRule(Protocol):
    """Says how many micro-batches there are, and looks at it again now and then."""

    count: int

    @property
    def is_due(self) -> bool:
        """Whether `review` should be called."""
        ...

    def measured(self, seconds: float, num_tokens: int, num_requests: int) -> None:
        """A verify call: seconds since the one before, tokens it committed, requests decoded by the cell."""
        ...

    def review(self, load: Load, cost: CostModel) -> None:
        """Choose the count anew."""
        ...


@dataclass(slots=True)
class FixedCount:
    """As configured."""

    count: int
    is_due: bool = False

    def measured(self, seconds: float, num_tokens: int, num_requests: int) -> None:
        """Nothing to learn."""

    def review(self, load: Load, cost: CostModel) -> None:
        """Nothing to choose."""


@dataclass(slots=True)
class SpinCount:
    """SPIN's heuristic on the offline profile, for whoever is being decoded."""

    drafters_at_once: int
    max_depth: int
    count: int = 1
    _calls: int = 0
    _num_requests: int = 0
    _reviewed_at: int = 0

    @property
    def is_due(self) -> bool:
        """After so many calls, and at once when there are many more or fewer requests."""
        return self._calls >= REVIEW_CALLS or _has_changed(self._num_requests, self._reviewed_at)

    def measured(self, seconds: float, num_tokens: int, num_requests: int) -> None:
        """Counts calls only."""
        self._calls += 1
        self._num_requests = num_requests

    def review(self, load: Load, cost: CostModel) -> None:
        """By profile alone: what was measured since does not count."""
        self._calls, self._reviewed_at = 0, self._num_requests
        offline = CostModel.corrected(cost.profile, {}, cost.kinds)
        machine = Machine(offline, self.drafters_at_once, max_depth=self.max_depth)
        self.count = spin_count(machine, load)


@dataclass(slots=True)
class _Window:
    """Verify calls since the last review."""

    calls: int = 0
    seconds: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class MeasuredCount:
    """Ours: the count of the highest predicted goodput, each prediction corrected by what was measured.

    A count that was not tried yet is believed to be off by as much as the nearest that was; one that was, by
    its own measurements, which are forgotten slowly. So a split that does not pay is taken back in the next
    review.
    """

    drafters_at_once: int
    max_depth: int
    count: int = 1
    _window: _Window = field(default_factory=_Window)
    _num_requests: int = 0
    _reviewed_at: int = 0
    # Measured by predicted goodput, by count; corrections of drafters by whether there was one micro-batch.
    _factor: dict[int, float] = field(default_factory=dict)
    _corrections: dict[bool, dict[str, float]] = field(default_factory=dict)

    @property
    def is_due(self) -> bool:
        """After so many calls, and at once when there are many more or fewer requests."""
        return self._window.calls >= REVIEW_CALLS or _has_changed(self._num_requests, self._reviewed_at)

    def measured(self, seconds: float, num_tokens: int, num_requests: int) -> None:
        """Adds to the window."""
        self._num_requests = num_requests
        self._window.calls += 1
        self._window.seconds += seconds
        self._window.tokens += num_tokens

    def review(self, load: Load, cost: CostModel) -> None:
        """Learn from the window, then take the best count if it is clearly better."""
        window, self._window = self._window, _Window()
        is_steady = not _has_changed(self._num_requests, self._reviewed_at)
        self._reviewed_at = self._num_requests
        self._corrections[self.count == 1] = dict(cost.corrections)
        most = most_micro_batches(load.num_requests)
        predicted = {
            count: self._machine(cost, load, count).best(load, count).goodput for count in range(1, most + 1)
        }
        here = predicted.get(self.count)
        if is_steady and here and window.calls >= REVIEW_CALLS and window.seconds > 0.0:
            self._learn(window.tokens / window.seconds / here)
        if here is None or not load.num_drafting:
            self.count = 1  # fewer requests than before, or none that is drafted for
            return
        if self.count not in self._factor:
            return  # nothing to compare others with
        goodput = {count: value * self._believed(count) for count, value in predicted.items()}
        best = max(goodput, key=lambda count: (goodput[count], -count))
        if goodput[best] > (1.0 + HYSTERESIS) * goodput[self.count]:
            self.count = best

    def _believed(self, count: int) -> float:
        """The count's own factor, else that of the nearest that was tried: splits are alike."""
        if count in self._factor:
            return self._factor[count]
        tried = [other for other in self._factor if (other == 1) == (count == 1)]
        nearest = min(tried, key=lambda other: abs(other - count), default=self.count)
        return self._factor[nearest]

    def _learn(self, ratio: float) -> None:
        known = self._factor.get(self.count)
        factor = ratio if known is None else known + SMOOTHING * (ratio - known)
        self._factor[self.count] = factor
        for count, other in self._factor.items():
            self._factor[count] = other + FORGOTTEN * (factor - other)

    def _machine(self, cost: CostModel, load: Load, count: int) -> Machine:
        """With the corrections of drafters as they are, or were, at this count.

        What is drafted ahead makes calls shorter than their forwards. Between the calls of several
        micro-batches there is less time for it.
        """
        corrections = dict(cost.corrections)
        held = self._corrections.get(count == 1)
        for name, correction in corrections.items():
            if name not in VERIFY and not name.endswith(PER_CALL):
                corrections[name] = max(1.0, correction) if held is None else held.get(name, correction)
        return Machine(
            CostModel.corrected(cost.profile, corrections, cost.kinds, cost.plain_by_size),
            self.drafters_at_once,
            max_depth=self.max_depth,
        )


def make_count_rule(setting: int | str, drafters_at_once: int, max_depth: int) -> CountRule:
    """The rule of `scheduler.micro_batches`: a number, `spin` or `auto`."""
    if setting == "auto":
        return MeasuredCount(max(1, drafters_at_once), max_depth)
    if setting == "spin":
        return SpinCount(max(1, drafters_at_once), max_depth)
    return FixedCount(int(setting))


def _has_changed(num_requests: int, before: int) -> bool:
    return not before / LOAD_CHANGE <= num_requests <= before * LOAD_CHANGE
