"""Micro-batches: who shares one, when it is complete, what the target verifies next (SPIN, section V-B)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from cluster.batching.iteration import Iteration
from cluster.config import SchedulerConfig
from cluster.cost_model import CostModel
from cluster.outstanding_verify import OutstandingVerify
from cluster.pipeline import Load, make_count_rule
from cluster.policies.base import DecodeRequest
from cluster.requests import Request, State
from cluster.running_mean import RunningMean
from cluster.verify_calls import VerifyCalls
from verifier.messages import VerifyResult

# Members that wait for nobody but themselves, all drafted for: when they began, their micro-batch, who.
Part = tuple[float, int, list[Request]]
IN_CALL = (State.DRAFTING, State.VERIFYING)
IN_ITERATION = (State.DRAFTING, State.DRAFTED, State.VERIFYING)
# Weight of the newest call in the mean rows of a request.
SMOOTHING = 0.1


class MicroBatches:
    """The micro-batches of the running requests.

    A micro-batch has a share of every drafter's requests, waits for all its drafts, and has a verify call of
    its own, as in the paper. With `auto` nobody waits for a drafter that is slower than the others by more
    than a forward takes, and what is complete is verified together where that pays. Requests for which
    nothing was drafted are never split.

    Attributes:
        cost: forward times.
        rule: chooses how many there are.
        calls_by_count: answered verify calls that decoded, by how many micro-batches there were then.
    """

    def __init__(self, config: SchedulerConfig, cost: CostModel, max_depth: int) -> None:
        self.cost = cost
        self.rule = make_count_rule(config.micro_batches, config.draft_ahead or 0, max_depth)
        self._is_ours = config.micro_batches == "auto"
        self._began: dict[str, float] = {}
        self._draft_s: dict[str, float] = {}
        # Seconds from the begin of an iteration to the draft, messages and waiting in line included.
        self._latency: dict[str, RunningMean] = {}
        self._slow: set[str] = set()
        self.calls_by_count: Counter[int] = Counter()
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

    def members(self, running: Collection[Request]) -> dict[int, list[Request]]:
        """Running requests by micro-batch. Who is between two iterations may change to another first."""
        if self.count == 1:
            return {0: list(running)} if running else {}
        self._even_out(running)
        by_batch: dict[int, list[Request]] = {}
        for request in running:
            by_batch.setdefault(request.micro_batch, []).append(request)
        return by_batch

    def ready_to_draft(self, of_batch: Collection[Request]) -> list[Request]:
        """Members that may begin an iteration; none while another member is in the middle of one.

        A slow drafter's members and the others do not wait for each other. Of several micro-batches, one that
        is complete is left alone until it is verified.
        """
        within = IN_ITERATION if self.count > 1 else IN_CALL
        if not self._slow:  # all wait for each other
            if not {request.state for request in of_batch}.isdisjoint(within):
                return []
            return [request for request in of_batch if request.state is State.READY]
        busy = {self._part_of(request) for request in of_batch if request.state in within}
        return [
            request
            for request in of_batch
            if request.state is State.READY and self._part_of(request) not in busy
        ]

    def is_held_up(self, running: Iterable[Request]) -> bool:
        """Whether a drafter's answer changes nothing: others still draft for the only micro-batch, or it is
        with the target.
        """
        if self.count != 1 or self._slow:
            return False
        return not {request.state for request in running}.isdisjoint(IN_CALL)

    def begin(self, ready: Collection[Request], now: float) -> None:
        """These begin an iteration."""
        ids = [request.request_id for request in ready]
        self._began.update(dict.fromkeys(ids, now))
        pop = self._draft_s.pop
        for request_id in ids:
            pop(request_id, None)

    def drafted(self, requests: Collection[Request], seconds: float, now: float) -> None:
        """The drafts of these requests are in; their drafter took so long."""
        self._draft_s.update(dict.fromkeys([request.request_id for request in requests], seconds))
        if not self._is_ours:
            return  # nothing goes by how long drafts take
        for request in requests:
            latency_s = now - self._began.get(request.request_id, now)
            latency = self._latency.get(request.drafter)
            if latency is None:
                latency = self._latency[request.drafter] = RunningMean(latency_s)
            latency.follow(latency_s)
            if len(self._latency) > 1:
                self._compare(request.drafter)

    def to_verify(self, by_batch: Mapping[int, list[Request]], now: float) -> list[Request]:
        """Members of complete micro-batches to verify in the next call; none only if none is complete.

        A micro-batch is complete when drafts are in for all its members that were drafted for, those of slow
        drafters apart. The one that began its iteration first has waited longest, and is always among them.
        """
        if self.count == 1 and not self._slow:  # all wait for each other
            members = by_batch.get(0, [])
            states = {request.state for request in members}
            if State.DRAFTED not in states or State.DRAFTING in states:
                return []
            return [request for request in members if request.state is State.DRAFTED]
        parts: list[Part] = []
        drafting: list[Request] = []
        for index, of_batch in by_batch.items():
            by_part: dict[str, list[Request]] = {}
            if self._slow:
                for request in of_batch:
                    by_part.setdefault(self._part_of(request), []).append(request)
            else:
                by_part[""] = of_batch
            for of_part in by_part.values():
                in_part = [request for request in of_part if request.state is State.DRAFTING]
                waiting = [request for request in of_part if request.state is State.DRAFTED]
                drafting += in_part
                if waiting and not in_part:
                    began = min([self._began.get(request.request_id, now) for request in waiting])
                    parts.append((began, index, waiting))
        if not parts:
            return []
        parts.sort(key=lambda part: part[:2])
        _, first, chosen = parts[0]
        rest = []
        for _, index, waiting in parts[1:]:
            if index == first or _drafted_nothing(waiting) or _drafted_nothing(chosen):
                chosen = chosen + waiting
            else:
                rest.append(waiting)
        if self._is_ours:
            next_s = min((self._drafted_at(request, now) for request in drafting), default=None)
            for place, waiting in enumerate(rest, start=1):
                if place < len(rest):
                    left_s: float | None = 0.0
                else:
                    left_s = None if next_s is None else max(0.0, next_s - now)
                if self._pays(chosen, waiting, left_s):
                    chosen = chosen + waiting
        return chosen

    def is_next_due(self, by_batch: Mapping[int, list[Request]], calls: VerifyCalls, now: float) -> bool:
        """Whether the call after the one the target works on should be sent already.

        Not while prompts wait, which go with the next call, nor while a draft will be in that could be
        verified together with what is complete.
        """
        outstanding = calls.all_outstanding
        if self.count == 1 or len(outstanding) > 1:
            return False
        states = {request.state for members in by_batch.values() for request in members}
        if State.DRAFTED not in states or State.PREFILLING in states:
            return False
        if not self._is_ours or State.DRAFTING not in states:
            return True
        drafting = [r for members in by_batch.values() for r in members if r.state is State.DRAFTING]
        next_at = min(self._drafted_at(request, now) for request in drafting)
        return next_at >= outstanding[0].sent_at + outstanding[0].predicted_s

    def verified(
        self, result: VerifyResult, sent: OutstandingVerify, num_running: int, now: float
    ) -> Iteration | None:
        """A verify call is answered: times of its iteration, None where they would mean nothing."""
        if not sent.trees:  # a forward of prompts alone is no part of an iteration
            self._undisturbed_since = self._verified_at = now
            return None
        self.calls_by_count[self.count] += 1
        if sent.drafted:
            num_rows = sum([len(tree.token) for tree in sent.trees.values()]) / len(sent.trees)
            self._num_rows += SMOOTHING * (num_rows - self._num_rows)
        pop_began, get_draft_s = self._began.pop, self._draft_s.get
        began = min([pop_began(request_id, now) for request_id in sent.trees])
        draft_s = max([get_draft_s(request_id, 0.0) for request_id in sent.trees])
        before, self._verified_at = self._verified_at, now
        if began >= now or began < self._undisturbed_since:
            return None
        # Drafters may find nothing, and what was proposed beside the target takes its drafts no time.
        drafted = sent.drafted or draft_s > 0.0
        slot_s = now - max(began, before)
        iteration = Iteration(now - began, draft_s, slot_s, drafted, sent.was_ahead)
        if not sent.prefilling:
            num_tokens = sum([len(verdict.tokens) for verdict in result.verdicts])
            self.rule.measured(iteration.slot_s, num_tokens, num_running)
        return iteration

    def waited_s(self, request_id: str, iteration: Iteration) -> float:
        """Seconds of its last iteration that a request, drafted for, waited for slower drafters of others."""
        return iteration.draft_s - self._draft_s.get(request_id, 0.0)

    def review(self, decoding: Sequence[DecodeRequest]) -> None:
        """Look at the count again, for these requests."""
        self.rule.review(Load.of(decoding), self.cost)

    def forget(self, request: Request) -> None:
        """The request ended."""
        self._began.pop(request.request_id, None)
        self._draft_s.pop(request.request_id, None)

    def keep(self, drafters: Container[str]) -> None:
        """These are left; nobody is compared any longer with those that are gone."""
        for name in [name for name in self._latency if name not in drafters]:
            del self._latency[name]
            self._slow.discard(name)
        for name in self._latency:
            self._compare(name)

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
        draft_s += self.cost.profile.overhead_s
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

    def _drafted_at(self, request: Request, now: float) -> float:
        """When the request, which is being drafted for, should have its draft, by what that took lately."""
        latency = self._latency.get(request.drafter)
        return now if latency is None else self._began.get(request.request_id, now) + latency.value

    def _compare(self, drafter: str) -> None:
        """A drafter is slow while its drafts come later than the quickest ones by what a forward costs."""
        mine_s = self._latency[drafter].value
        lag_s = mine_s - min(latency.value for latency in self._latency.values())
        forward_s = self.cost.verify_seconds(1, 1, 0, drafted=True)
        if lag_s > forward_s:
            self._slow.add(drafter)
        elif lag_s <= forward_s / 2:
            self._slow.discard(drafter)

    def _part_of(self, request: Request) -> str:
        return request.drafter if request.drafter in self._slow else ""

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
