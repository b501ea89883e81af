"""Micro-batches: who shares one, when it is complete, what the target verifies next (SPIN, section V-B)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from cluster.batching.iteration import Iteration
from cluster.config import SchedulerConfig
from cluster.cost_model import CostModel
from cluster.drafter_pool import DrafterPool
from cluster.pipeline import Load, make_count_rule
from cluster.policies.base import DecodeRequest
from cluster.requests import Request, State
from cluster.verify_calls import OutstandingVerify
from verifier.messages import VerifyResult

# Index of a micro-batch and, where drafters do not wait for each other, the drafter of this part of it.
Key = tuple[int, str]
# Weight of the newest call in the mean rows of a request.
SMOOTHING = 0.1


class MicroBatches:
    """The micro-batches of the running requests.

    With a configured number of them, and with SPIN's heuristic, a micro-batch has a share of every drafter's
    requests, waits for all its drafts and has a verify call of its own, as in the paper. With `auto` the
    requests of one drafter come one after the other, so that few micro-batches have several; no drafter's
    part of a micro-batch waits for another's; and what is complete is verified together where that pays.
    Requests for which nothing was drafted are never split.
    """

    def __init__(self, config: SchedulerConfig, cost: CostModel, pool: DrafterPool, max_depth: int) -> None:
        self.cost = cost
        self.pool = pool
        self.rule = make_count_rule(config.micro_batches, config.draft_ahead or 0, max_depth)
        self._merges = config.micro_batches == "auto"
        self._began: dict[str, float] = {}
        self._draft_s: dict[str, float] = {}
        self._verified_at = self._undisturbed_since = float("-inf")
        # Mean rows of a request in a verify call, for those that are still to be chosen.
        self._num_rows = 1.0

    @property
    def count(self) -> int:
        """How many there are."""
        return self.rule.count

    def join(self, request: Request, running: Collection[Request]) -> None:
        """Put a new request, whose drafter is chosen, where it evens sizes out."""
        request.micro_batch = 0
        if self.count > 1:
            sizes = Counter(other.micro_batch for other in running)
            same = Counter(other.micro_batch for other in running if other.drafter == request.drafter)
            request.micro_batch = min(range(self.count), key=lambda index: (sizes[index], same[index]))

    def members(self, running: Collection[Request]) -> dict[Key, list[Request]]:
        """Running requests by micro-batch. Who is between two iterations may change to another first."""
        if self.count == 1:
            return {(0, ""): list(running)} if running else {}
        if self._merges:
            self._follow_drafters(running)
        else:
            self._even_out(running)
        by_batch: dict[Key, list[Request]] = {}
        for request in running:
            key = (request.micro_batch, request.drafter if self._merges else "")
            by_batch.setdefault(key, []).append(request)
        return by_batch

    def ready_to_draft(self, of_batch: Iterable[Request]) -> list[Request]:
        """Members that may begin an iteration; none while another member is in the middle of one.

        Of several micro-batches, one that is complete is left alone until it is verified.
        """
        ready = []
        for request in of_batch:
            if request.state in (State.DRAFTING, State.VERIFYING):
                return []
            if request.state is State.DRAFTED and self.count > 1:
                return []
            if request.state is State.READY:
                ready.append(request)
        return ready

    def begin(self, ready: Iterable[Request], now: float) -> None:
        """These begin an iteration."""
        for request in ready:
            self._began[request.request_id] = now
            self._draft_s.pop(request.request_id, None)

    def drafted(self, request: Request, seconds: float) -> None:
        """The request's draft is in; its drafter took so long."""
        self._draft_s[request.request_id] = seconds

    def to_verify(self, by_batch: Mapping[Key, list[Request]], now: float) -> list[Request]:
        """Members of complete micro-batches to verify in the next call; none only if none is complete.

        A micro-batch is complete when drafts are in for all its members that were drafted for. The one that
        began its iteration first has waited longest, and is always among them.
        """
        complete: list[tuple[float, Key, list[Request]]] = []
        is_drafting = False
        for key, of_batch in by_batch.items():
            states = {request.state for request in of_batch}
            is_drafting |= State.DRAFTING in states
            if State.DRAFTED in states and State.DRAFTING not in states:
                waiting = [request for request in of_batch if request.state is State.DRAFTED]
                began = min(self._began.get(request.request_id, now) for request in waiting)
                complete.append((began, key, waiting))
        if not complete:
            return []
        complete.sort(key=lambda entry: entry[:2])
        chosen = complete[0][2]
        left_s = self._draft_left_s(now) if is_drafting else None
        for place, (_, _, waiting) in enumerate(complete[1:], start=2):
            is_last = place == len(complete)
            if (
                _drafted_nothing(waiting)
                or _drafted_nothing(chosen)
                or (self._merges and self._pays(chosen, waiting, left_s if is_last else 0.0))
            ):
                chosen = chosen + waiting
        return chosen

    def verified(
        self, result: VerifyResult, sent: OutstandingVerify, num_running: int, now: float
    ) -> Iteration | None:
        """A verify call is answered: times of its iteration, None where they would mean nothing."""
        if not sent.trees:  # a forward of prompts alone is no part of an iteration
            self._undisturbed_since = self._verified_at = now
            return None
        if sent.drafted:
            num_rows = sum(map(len, sent.trees.values())) / len(sent.trees)
            self._num_rows += SMOOTHING * (num_rows - self._num_rows)
        began = min(self._began.pop(request_id, now) for request_id in sent.trees)
        draft_s = max(self._draft_s.get(request_id, 0.0) for request_id in sent.trees)
        before, self._verified_at = self._verified_at, now
        if began >= now or began < self._undisturbed_since:
            return None
        iteration = Iteration(now - began, draft_s, now - max(began, before))
        if not sent.prefilling:
            num_tokens = sum(len(verdict.tokens) for verdict in result.verdicts)
            self.rule.measured(iteration.slot_s, num_tokens, num_running)
        return iteration

    def review(self, decoding: Sequence[DecodeRequest]) -> None:
        """Look at the count again, for these requests."""
        self.rule.review(Load.of(decoding), self.cost)

    def forget(self, request: Request) -> None:
        """The request ended."""
        self._began.pop(request.request_id, None)
        self._draft_s.pop(request.request_id, None)

    def _pays(self, chosen: list[Request], more: list[Request], left_s: float | None) -> bool:
        """Whether one forward is better than two: does what it saves exceed what the target waits afterwards?

        Args:
            chosen: in the call already.
            more: complete, too.
            left_s: seconds until the next micro-batch is complete; None if all of them are in these two.
        """
        both_s = self._verify_s(chosen + more)
        saved_s = self._verify_s(chosen) + self._verify_s(more) - both_s
        draft_s = max(self._draft_s.get(request.request_id, 0.0) for request in chosen)
        draft_s += self.cost.profile.overhead_s / 2
        # Apart, the first is drafted for again while the second is verified.
        idle_apart_s = max(0.0, draft_s - self._verify_s(more))
        if left_s is None:
            return saved_s >= draft_s - idle_apart_s
        idle_s = max(0.0, left_s - both_s)
        return saved_s >= idle_s - min(idle_apart_s, max(0.0, left_s - self._verify_s(chosen)))

    def _verify_s(self, requests: list[Request]) -> float:
        num_context = sum(request.num_tokens for request in requests)
        num_rows = round(self._num_rows * len(requests))
        return self.cost.verify_seconds(len(requests), num_rows, num_context, drafted=True)

    def _draft_left_s(self, now: float) -> float:
        """Predicted seconds until the first of the draft calls under way is answered."""
        ends = [
            call.sent_at + call.predicted_s
            for drafter in self.pool.drafters.values()
            for call in drafter.outstanding.values()
            if call.predicted_s > 0.0
        ]
        return max(0.0, min(ends, default=now) - now)

    def _follow_drafters(self, running: Collection[Request]) -> None:
        """Equal parts of the requests in the order of their drafters."""
        ordered = sorted(running, key=lambda request: (request.drafter, request.order))
        for place, request in enumerate(ordered):
            if request.state is State.READY or not request.opened:
                request.micro_batch = place * self.count // len(ordered)

    def _even_out(self, running: Collection[Request]) -> None:
        """Move who is between iterations out of micro-batches that are gone or more than one too large."""
        sizes = Counter(dict.fromkeys(range(self.count), 0))
        sizes.update(request.micro_batch for request in running if request.micro_batch < self.count)
        for request in running:
            if request.state is not State.READY:
                continue
            smallest = min(range(self.count), key=sizes.__getitem__)
            is_gone = request.micro_batch >= self.count
            if is_gone or sizes[request.micro_batch] > sizes[smallest] + 1:
                sizes[request.micro_batch] -= not is_gone
                sizes[smallest] += 1
                request.micro_batch = smallest


def _drafted_nothing(requests: Iterable[Request]) -> bool:
    return all(request.tree is None or request.tree.num_drafted == 0 for request in requests)
