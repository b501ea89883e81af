"""Building verify calls and remembering those the target has not answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.call_parts import NO_ROWS, Rows, chunk_rows
from cluster.cost_model import CostModel
from cluster.forced_tokens import most_forced
from cluster.head_proposals import NOTHING_WANTED, HeadProposals, Wanted
from cluster.outstanding_verify import OutstandingVerify
from cluster.requests import Request, State, Trigger, advance_all
from drafters.messages import DraftPlan
from engine.stop_rules import StopRule
from engine.tree import TokenTree
from verifier.messages import PrefillItem, PrefillProgress, VerifyCall, VerifyItem, VerifyResult

# What stands for the tree of a request whose last token a call at the target decides: some root, alone.
UNDECIDED = TokenTree.root_only(0)


@dataclass(slots=True)
class VerifyCalls:
    """Calls the target works on, or has waiting for when it is done; it takes them in order.

    Releases owed to the target go out with the next call.

    Attributes:
        cost: predicts forwards.
        heads: says for which requests the target's decoding heads are evaluated; for none if None.
        num_owed: KV slots, at least, that requests which ended leave free with the next call.
    """

    cost: CostModel
    heads: HeadProposals | None = None
    num_owed: int = 0
    _sent: dict[int, OutstandingVerify] = field(default_factory=dict)
    _release: list[str] = field(default_factory=list)
    _last_id: int = 0

    @property
    def outstanding(self) -> OutstandingVerify | None:
        """The call sent last, if it is not answered."""
        return next(reversed(self._sent.values()), None)

    @property
    def all_outstanding(self) -> list[OutstandingVerify]:
        """Calls not answered yet, in order."""
        return list(self._sent.values())

    def sent(self, call_id: int) -> OutstandingVerify | None:
        """The call, if it is not answered."""
        return self._sent.get(call_id)

    @property
    def num_tokens(self) -> int:
        """KV slots that outstanding calls may still take."""
        return sum(call.num_tokens for call in self._sent.values())

    @property
    def ending(self) -> list[str]:
        """Requests whose prompts end with the call sent last, unless slots are fewer than they seemed."""
        return [] if self.outstanding is None else self.outstanding.ending

    @property
    def ahead(self) -> OutstandingVerify | None:
        """The call sent ahead of the answer that its requests' last tokens come with, if there is one."""
        last = self.outstanding
        return last if last is not None and last.is_ahead else None

    def left_s(self, now: float) -> float:
        """Seconds until the target should be done with all it was sent."""
        calls = self.all_outstanding
        if not calls:
            return 0.0
        first_s = max(0.0, calls[0].sent_at + calls[0].predicted_s - now)
        return first_s + sum([call.predicted_s for call in calls[1:]])

    def num_reading(self, request: Request) -> int:
        """Tokens of the request's prompt in calls that are not answered, at most."""
        calls = self._sent.values()
        return sum([call.prefilling.get(request.request_id, 0) for call in calls if call.has(request)])

    def release(self, request: Request, *, has_ended: bool = False) -> None:
        """The target may forget the request.

        What one that has ended held is free before the next call takes any slots, though the target has not
        said so. Those of its prompt may be shared with others.
        """
        self._release.append(request.request_id)
        if has_ended:
            self.num_owed += max(0, request.num_computed - request.num_prompt)

    def build(
        self,
        requests: Sequence[Request],
        trees: Mapping[str, TokenTree],
        chunks: Sequence[tuple[Request, int]],
        now: float,
    ) -> VerifyCall | None:
        """The next call, which is then outstanding; None if there is nothing to do.

        Args:
            requests: those whose draft trees are verified; they move to VERIFYING.
            trees: their draft trees, by request id.
            chunks: requests to prefill and most tokens for each; they move to PREFILL_SENT.
            now: the scheduler's clock.
        """
        if not requests and not chunks:
            return None
        verify = []
        stop_rule: StopRule | None = None
        wanted_for = self._wanted(len(requests) + len(chunks))
        num_tokens = num_context = num_attended = num_forced = 0
        # Also where no draft is verified in the end: what slows the target is that drafters worked.
        drafted = any(request.tree is not None and len(request.tree.token) > 1 for request in requests)
        advance_all(requests, Trigger.VERIFY_SENT)
        for request in requests:
            request.tree = tree = trees[request.request_id]
            request.last_served_at = now
            wanted = NOTHING_WANTED if wanted_for is None else wanted_for(request)
            stop_rule = stop_rule or wanted.stop_rule
            submit = request.submit
            max_forced = 0 if submit.sampling.constraint is None else most_forced(submit, tree)
            num_forced += max_forced
            verify.append(
                VerifyItem(
                    request_id=request.request_id,
                    tree=tree,
                    num_candidates=wanted.num_candidates,
                    num_heads=wanted.num_heads,
                    least_logp=wanted.least_logp,
                    stop_token_logp=wanted.stop_token_logp,
                    max_forced=max_forced,
                )
            )
            num_rows, context = len(tree.token), request.num_tokens
            num_tokens += num_rows
            num_context += context
            num_attended += num_rows * context
        prefill = []
        for request, most in chunks:
            wanted = NOTHING_WANTED if wanted_for is None else wanted_for(request)
            stop_rule = stop_rule or wanted.stop_rule
            prefill.append(_chunk(request, most, wanted, now))
        decoding = Rows(len(verify), num_tokens, num_context, num_attended)
        reading = _reading(chunks)
        self._last_id += 1
        self._sent[self._last_id] = OutstandingVerify(
            call_id=self._last_id,
            drafted=drafted,
            decoding=decoding,
            parts=self.cost.call_parts(decoding, reading, drafted=drafted),
            trees={request.request_id: trees[request.request_id] for request in requests},
            prefilling={item.request_id: item.num_tokens for item in prefill},
            ending=_ending(chunks),
            members=_members(requests, chunks),
            num_tokens=num_tokens + int(reading.num_tokens) + num_forced,
            decides_one=num_tokens + num_forced == len(requests),
            sent_at=now,
            proposes=any(i.num_candidates for i in verify) or any(i.num_candidates for i in prefill),
        )
        return VerifyCall(
            call_id=self._last_id,
            verify=verify,
            prefill=prefill,
            release=self._take_release(),
            stop_rule=stop_rule,
        )

    def build_ahead(
        self,
        requests: Sequence[Request],
        chunks: Sequence[tuple[Request, int]],
        now: float,
        plans: Mapping[str, DraftPlan] | None = None,
    ) -> VerifyCall:
        """The call after the outstanding one: these requests go on from the tokens which that one decides.

        They are all in that one and stay as they are until it is answered.

        Args:
            requests: those that decode.
            chunks: of prompts of others, as of `build`. Who has one in the outstanding call, too, is as it
                will be after that.
            now: the scheduler's clock.
            plans: of draft trees that the target grows from what is proposed in the outstanding call; None if
                nothing is drafted, nor proposed in this one.
        """
        num_requests = len(requests)
        wanted_for = None if plans is None else self._wanted(num_requests + len(chunks))
        # By then each of them has one token more.
        num_context = num_requests + sum([request.num_tokens for request in requests])
        for request in requests:
            request.last_served_at = now
        all_wanted = [NOTHING_WANTED if wanted_for is None else wanted_for(request) for request in requests]
        verify = [
            VerifyItem(
                request_id=request.request_id,
                num_candidates=wanted.num_candidates,
                num_heads=wanted.num_heads,
                least_logp=wanted.least_logp,
                stop_token_logp=wanted.stop_token_logp,
                plan=None if plans is None else plans.get(request.request_id),
            )
            for request, wanted in zip(requests, all_wanted, strict=True)
        ]
        num_rows = sum([item.num_nodes for item in verify])  # at most
        attended = num_context if num_rows == num_requests else num_context * num_rows / num_requests
        decoding, reading = Rows(num_requests, num_rows, num_context, attended), _reading(chunks)
        prefill = []
        for request, most in chunks:
            wanted = NOTHING_WANTED if wanted_for is None else wanted_for(request)
            all_wanted.append(wanted)
            prefill.append(_chunk(request, most, wanted, now))
        before = self.outstanding
        assert before is not None
        self._last_id += 1
        self._sent[self._last_id] = OutstandingVerify(
            call_id=self._last_id,
            drafted=bool(plans),
            decoding=decoding,
            parts=self.cost.call_parts(decoding, reading, drafted=bool(plans)),
            trees=dict.fromkeys([item.request_id for item in verify], UNDECIDED),
            prefilling={item.request_id: item.num_tokens for item in prefill},
            ending=_ending(chunks),
            members=_members(requests, chunks),
            num_tokens=num_rows + int(reading.num_tokens),
            decides_one=not plans,
            sent_at=now,
            is_ahead=True,
            num_ahead=before.num_ahead + 1,
            plans=plans,
            planned_by={request.request_id: request.drafter for request in requests} if plans else {},
            reading=reading,
            proposes=any(one.num_candidates for one in all_wanted),
        )
        return VerifyCall(
            call_id=self._last_id,
            verify=verify,
            prefill=prefill,
            release=self._take_release(),
            stop_rule=next((one.stop_rule for one in all_wanted if one.stop_rule is not None), None),
        )

    def grown(
        self, call: OutstandingVerify, requests: Sequence[Request], trees: Mapping[str, TokenTree]
    ) -> None:
        """The trees, by request id, of these requests, which go on in a call that was planned ahead."""
        call.trees.update(trees)
        sizes = [len(tree.token) for tree in call.trees.values()]
        num_rows, num_context = sum(sizes), sum([request.num_tokens for request in requests])
        attended = sum([len(trees[r.request_id].token) * r.num_tokens for r in requests])
        call.decoding = Rows(len(sizes), num_rows, num_context, attended)
        call.drafted = num_rows > len(sizes)
        call.parts = self.cost.call_parts(call.decoding, call.reading, drafted=call.drafted)
        call.num_tokens = num_rows + int(call.reading.num_tokens)

    def begin_ahead(self, now: float) -> bool:
        """The call before is answered: the target begins with the one sent ahead, if there is one."""
        ahead = self.ahead
        if ahead is None:
            return False
        ahead.is_ahead, ahead.sent_at = False, now
        return True

    def _take_release(self) -> list[str]:
        release, self._release, self.num_owed = self._release, [], 0
        return release

    def _wanted(self, num_requests: int) -> Callable[[Request], Wanted] | None:
        """What a call of so many requests asks of the heads for each of them; None without heads."""
        heads, num_outstanding = self.heads, len(self._sent)
        if heads is None or not heads.are_there:
            return None
        return lambda request: heads.wanted(request, num_requests, num_outstanding)

    def answered(self, result: VerifyResult) -> OutstandingVerify | None:
        """What was asked, if this is the answer waited for; before any request is changed by it."""
        sent = self._sent.pop(result.call_id, None)
        if sent is not None and sent.prefilling:
            reading = _computed(sent, result.prefills)
            # What was found cached took no time: counted as rows, prompts would seem to cost hardly any.
            if reading.num_tokens != sum(sent.prefilling.values()):
                sent.parts = self.cost.call_parts(sent.decoding, reading, drafted=sent.drafted)
        return sent

    def take_over(self, before: VerifyCalls) -> None:
        """Go on where other calls to the same target ended; none of them is outstanding."""
        self._release, self._last_id = list(before._release), before._last_id
        self.num_owed = before.num_owed

    def lose(self) -> None:
        """The target is gone, and with it all it held."""
        self._sent.clear()
        self._release.clear()
        self.num_owed = 0


def _reading(chunks: Sequence[tuple[Request, int]]) -> Rows:
    reading = NO_ROWS
    for request, most in chunks:
        reading = reading.with_rows(chunk_rows(request.num_computed, most))
    return reading


def _computed(sent: OutstandingVerify, prefills: Sequence[PrefillProgress]) -> Rows:
    """The rows of prompts that a call turned out to have."""
    reading = NO_ROWS
    for progress in prefills:
        most = sent.prefilling.get(progress.request_id)
        if most is not None:
            request, _ = sent.members[progress.request_id]
            before = max(request.num_computed, progress.num_cached)
            num_rows = min(max(0, progress.num_computed - before), most)
            reading = reading.with_rows(chunk_rows(before, num_rows))
    return reading


def _ending(chunks: Sequence[tuple[Request, int]]) -> list[str]:
    return [
        request.request_id for request, most in chunks if request.num_computed + most >= request.num_tokens
    ]


def _members(
    requests: Sequence[Request], chunks: Sequence[tuple[Request, int]]
) -> dict[str, tuple[Request, int]]:
    everybody = [*requests, *[request for request, _ in chunks]]
    return {request.request_id: (request, request.num_preemptions) for request in everybody}


def _chunk(request: Request, num_tokens: int, wanted: Wanted, now: float) -> PrefillItem:
    spec = None
    if not request.opened:
        spec, request.opened, request.begun_at = request.spec(), True, now
    if request.first_chunk_at is None:
        request.first_chunk_at = now
    if request.state is not State.PREFILL_SENT:  # else it has a chunk in the call before
        request.advance(Trigger.CHUNK_SENT)
    request.last_served_at = now
    return PrefillItem(
        request_id=request.request_id,
        num_tokens=num_tokens,
        spec=spec,
        num_candidates=wanted.num_candidates,
        num_heads=wanted.num_heads,
        least_logp=wanted.least_logp,
        stop_token_logp=wanted.stop_token_logp,
    )
