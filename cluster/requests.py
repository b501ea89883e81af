"""One request as the scheduler sees it: a transition table and the tokens that outlive every worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from types import MappingProxyType

from cluster.stream_messages import Objective, Prediction, Submit
from engine.proposals import Proposals
from engine.sampling_params import RequestSpec
from engine.tree import TokenTree
from verifier.messages import TokenLogprobs, Verdict

#: What drafted the tokens that a request's grammar leaves no choice about.
GRAMMAR = "grammar"


class State(IntEnum):
    """Where a request is in its life. Integers only because they hash fast; their order means nothing."""

    WAITING = auto()  # queued; the target holds none of its KV
    PREFILLING = auto()  # admitted; part of its sequence is not in the target's KV yet
    PREFILL_SENT = auto()  # a chunk is in the outstanding verify call
    READY = auto()  # prefilled and idle: may be drafted for
    DRAFTING = auto()  # a draft call is outstanding
    DRAFTED = auto()  # its candidate tree (perhaps only the root) waits for verification
    VERIFYING = auto()  # its draft tree is in an outstanding verify call, or in that and the one sent ahead
    FINISHED = auto()  # ended, for whatever reason


# Part of the sequence is still to be computed.
PREFILL = (State.PREFILLING, State.PREFILL_SENT)


class Trigger(IntEnum):
    """What moves a request from state to state."""

    ADMITTED = auto()
    CHUNK_SENT = auto()
    CHUNK_DONE = auto()
    PREFILLED = auto()
    DRAFT_SENT = auto()
    DRAFT_DONE = auto()  # also: skipped, timed out, or the drafter died (a root-only tree)
    VERIFY_SENT = auto()
    VERIFIED = auto()
    DEFERRED = auto()  # the target had no slots for it in this step
    PREEMPTED = auto()  # its KV was given up, or lost with the target
    FINISH = auto()


TRANSITIONS = MappingProxyType(
    {
        (State.WAITING, Trigger.ADMITTED): State.PREFILLING,
        (State.WAITING, Trigger.FINISH): State.FINISHED,
        (State.PREFILLING, Trigger.CHUNK_SENT): State.PREFILL_SENT,
        (State.PREFILLING, Trigger.PREEMPTED): State.WAITING,
        (State.PREFILLING, Trigger.FINISH): State.FINISHED,
        (State.PREFILL_SENT, Trigger.CHUNK_DONE): State.PREFILLING,
        (State.PREFILL_SENT, Trigger.DEFERRED): State.PREFILLING,
        (State.PREFILL_SENT, Trigger.PREFILLED): State.READY,
        (State.PREFILL_SENT, Trigger.PREEMPTED): State.WAITING,
        (State.PREFILL_SENT, Trigger.FINISH): State.FINISHED,
        (State.READY, Trigger.DRAFT_SENT): State.DRAFTING,
        (State.READY, Trigger.DRAFT_DONE): State.DRAFTED,
        (State.READY, Trigger.PREEMPTED): State.WAITING,
        (State.READY, Trigger.FINISH): State.FINISHED,
        (State.DRAFTING, Trigger.DRAFT_DONE): State.DRAFTED,
        (State.DRAFTING, Trigger.PREEMPTED): State.WAITING,
        (State.DRAFTING, Trigger.FINISH): State.FINISHED,
        (State.DRAFTED, Trigger.VERIFY_SENT): State.VERIFYING,
        (State.DRAFTED, Trigger.PREEMPTED): State.WAITING,
        (State.DRAFTED, Trigger.FINISH): State.FINISHED,
        (State.VERIFYING, Trigger.VERIFIED): State.READY,
        (State.VERIFYING, Trigger.DEFERRED): State.DRAFTED,
        (State.VERIFYING, Trigger.PREEMPTED): State.WAITING,
        (State.VERIFYING, Trigger.FINISH): State.FINISHED,
    }
)


# The same by state: four look-ups are made for each request and step.
_NEXT: dict[State, dict[Trigger, State]] = {state: {} for state in State}
for (_state, _trigger), _target in TRANSITIONS.items():
    _NEXT[_state][_trigger] = _target


# And by trigger, for many requests that the same thing happens to.
_AFTER: dict[Trigger, dict[State, State]] = {trigger: {} for trigger in Trigger}
for (_state, _trigger), _target in TRANSITIONS.items():
    _AFTER[_trigger][_state] = _target


class IllegalTransition(RuntimeError):
    """The scheduler tried to move a request in a way the table does not know: a bug, never user input."""


@dataclass(slots=True, eq=False)
class Request:
    """State, tokens and accounts of one request. Times are the scheduler's clock, in seconds.

    Attributes:
        submit: what the front end sent.
        client: which front end.
        arrived: when it came.
        order: admission order among equals; a preempted request keeps its own.
        output: committed tokens; the first `num_resubmitted` of them in another life of the request.
        num_computed: tokens of its sequence in the target's KV (the last known token never is).
        opened: whether the target holds an entry for it (so that a release is owed).
        drafter: name of the drafter instance serving it; empty before one is assigned.
        drafted_by, drafted_kind: instance that it had when its iteration began, and the kind of that, empty
            where that only reads, or are heads that were not asked about it yet; the draft tree is theirs
            also when it has moved on meanwhile.
        heard: per drafter, how many tokens of the sequence it has been told.
        draft_call: id of the draft call waited for.
        tree: the candidate tree of this step; then, once selected, the draft tree.
        candidates: the candidate tree until the step is committed, if the request asks for a trace.
        prompt_logprobs: of the prompt as far as it is prefilled; sent with the first output token.
        proposals: what the target's decoding heads proposed with its last verdict, if it was asked for them.
        micro_batch: index of the micro-batch it belongs to while running.
        begun_at: when its first chunk was sent since it was admitted last.
        ran_s: seconds since its arrival that were no waiting, as it ran until it gave way.
        last_served_at: when it was last in a verify call that was sent.
        predicted: latencies predicted on arrival; None if there was nothing to predict from.
        pace: objectives that scheduling goes by: `e2e_ms` stands in them as what it leaves for the first
            token and for each of the others.
        request_id: the id chosen by the front end.
        num_prompt: tokens of the prompt.
        num_tokens: prompt and committed output.
        num_remaining: output tokens it may still get by its own `max_tokens`.
        is_unrestricted: whether any drafter may draft for it, as many tokens as there may be.
    """

    submit: Submit
    client: str
    arrived: float
    order: int
    predicted: Prediction | None = None
    output: list[int] = field(default_factory=list)
    state: State = State.WAITING
    num_computed: int = 0
    opened: bool = False
    drafter: str = ""
    drafted_by: str = ""
    drafted_kind: str = ""
    heard: dict[str, int] = field(default_factory=dict)
    draft_call: int = -1
    tree: TokenTree | None = None
    candidates: TokenTree | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    proposals: Proposals | None = None
    micro_batch: int = 0
    first_chunk_at: float | None = None
    begun_at: float | None = None
    ran_s: float = 0.0
    last_served_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_cached: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    # Whether it was preempted since its last token, and seconds that cost it, before its first and after.
    is_resuming: bool = False
    # It gave way before it was read: what it seemed to share was perhaps not there.
    shared_in_vain: bool = False
    preempted_s: tuple[float, float] = (0.0, 0.0)
    num_resubmitted: int = field(init=False)
    accepted_by_drafter: dict[str, int] = field(default_factory=dict)
    accepted_by_depth: list[int] = field(default_factory=list)
    min_gap: float = float("inf")
    # Asked for a dozen times a step, so they are kept at hand.
    pace: Objective = field(init=False)
    request_id: str = field(init=False)
    num_prompt: int = field(init=False)
    num_tokens: int = field(init=False)
    num_remaining: int = field(init=False)
    is_unrestricted: bool = field(init=False)

    def __post_init__(self) -> None:
        self.request_id, self.num_prompt = self.submit.request_id, len(self.submit.prompt)
        self.num_resubmitted = len(self.submit.output)
        self.num_tokens = self.num_prompt + len(self.output)
        self.num_remaining = self.submit.sampling.max_tokens - len(self.output)
        wish = self.submit.speculation
        self.is_unrestricted = wish.mode != "off" and not wish.drafters and wish.max_tokens is None
        self.pace = self._paced()

    @property
    def last_token(self) -> int:
        """The root of its next tree."""
        return self.output[-1] if self.output else self.submit.prompt[-1]

    @property
    def is_running(self) -> bool:
        """Admitted and not ended."""
        return self.state not in (State.WAITING, State.FINISHED)

    def advance(self, trigger: Trigger) -> None:
        """Move to the next state, or raise IllegalTransition."""
        target = _NEXT[self.state].get(trigger)
        if target is None:
            raise IllegalTransition(f"request {self.request_id}: {trigger.name} while {self.state.name}")
        self.state = target

    def awaits(self, call_id: int) -> bool:
        """Whether it waits for this very draft call."""
        return self.draft_call == call_id and self.state is State.DRAFTING

    def drafted(self, tree: TokenTree) -> None:
        """Its candidate tree is here; the root alone when nothing was or could be drafted."""
        self.tree = tree
        if self.submit.speculation.trace:
            self.candidates = tree
        self.draft_call = -1
        self.advance(Trigger.DRAFT_DONE)

    def grown(self, tree: TokenTree) -> None:
        """Its draft tree, which the target has grown itself, is known."""
        self.tree = tree
        if self.submit.speculation.trace:
            self.candidates = tree
        self.num_drafted += len(tree.token) - 1

    def tokens_from(self, start: int) -> list[int]:
        """Tokens of the sequence at positions `start` and later."""
        prompt = self.submit.prompt
        if start >= len(prompt):
            return self.output[start - len(prompt) :]
        return prompt[start:] + self.output

    def spec(self) -> RequestSpec:
        """What a worker needs to open the request as it stands."""
        return RequestSpec(
            request_id=self.request_id,
            tokens=self.submit.prompt + self.output,
            prompt_len=len(self.submit.prompt),
            sampling=self.submit.sampling,
            adapter=self.submit.adapter,
            cache_salt=self.submit.cache_salt,
        )

    def deferred(self) -> None:
        """The target had no slots for it; of a request that it was only about to open it keeps nothing."""
        self.advance(Trigger.DEFERRED)
        self.opened = self.num_computed > 0

    def preempt(self, *, lost: bool = False) -> None:
        """Forget everything that lived in the target's KV; `lost` when the target has, for all alike."""
        self.shared_in_vain |= self.state in PREFILL and not lost
        self.advance(Trigger.PREEMPTED)
        if not lost and self.begun_at is not None and self.last_served_at is not None:
            self.ran_s += max(0.0, self.last_served_at - self.begun_at)
        self.begun_at = None
        self.num_computed = 0
        self.opened = False
        self.tree = self.candidates = self.proposals = None
        self.prompt_logprobs = []
        self.draft_call = -1
        self.is_resuming = self.first_chunk_at is not None

    def commit(self, verdict: Verdict, now: float) -> None:
        """Append the tokens of a verdict and keep the accounts."""
        if self.is_resuming:
            self._resume(now)
        if self.first_token_at is None:
            self.first_token_at = now
            self.pace = self._paced()
        self.last_token_at = now
        self.extend(verdict.tokens)
        self.proposals = verdict.proposals
        self.num_computed = self.num_tokens - 1
        self.num_steps += 1
        if verdict.min_gap < self.min_gap:
            self.min_gap = verdict.min_gap
        tree, self.tree, self.candidates = self.tree, None, None
        num_accepted = verdict.num_accepted
        num_drafted = 0 if tree is None else len(tree.token) - 1
        if num_drafted:
            self.num_verified += num_drafted
            accepted = self.accepted_by_drafter
            kind = self.drafted_kind
            accepted[kind] = accepted.get(kind, 0) + num_accepted
        self.num_accepted += num_accepted
        if verdict.num_forced:
            num_accepted += verdict.num_forced_accepted
            self.num_drafted += verdict.num_forced
            self.num_verified += verdict.num_forced
            self.num_accepted += verdict.num_forced_accepted
            accepted = self.accepted_by_drafter
            accepted[GRAMMAR] = accepted.get(GRAMMAR, 0) + verdict.num_forced_accepted
        if num_accepted:
            by_depth = self.accepted_by_depth
            while len(by_depth) < num_accepted:
                by_depth.append(0)
            for depth in range(num_accepted):
                by_depth[depth] += 1

    def extend(self, tokens: Sequence[int]) -> None:
        """These are the next tokens of its output."""
        num_tokens = len(tokens)
        self.output.extend(tokens)
        self.num_tokens += num_tokens
        self.num_remaining -= num_tokens

    def _resume(self, now: float) -> None:
        """It has its next token after a preemption."""
        before, after = self.preempted_s
        self.is_resuming = False
        if self.last_token_at is None:
            started = self.first_chunk_at if self.first_chunk_at is not None else now
            self.preempted_s = (before + now - started, after)
        else:
            self.preempted_s = (before, after + now - self.last_token_at)

    def finish_reason(self, max_model_tokens: int) -> str | None:
        """ "stop", "length" or None, from the committed tokens alone."""
        if not self.output:
            return None
        sampling = self.submit.sampling
        if self.output[-1] in sampling.stop_token_ids and (
            # A grammar may leave nothing but a stop token before `min_tokens`.
            len(self.output) > sampling.min_tokens or sampling.constraint is not None
        ):
            return "stop"
        if self.num_remaining <= 0 or self.num_tokens >= max_model_tokens:
            return "length"
        return None

    def tpot_so_far(self) -> float | None:
        """Mean seconds per output token after the first; None below two tokens."""
        if self.first_token_at is None or self.last_token_at is None or len(self.output) < 2:
            return None
        decoded = len(self.output) - 1 - self.num_resubmitted
        if decoded < 1:
            return None
        return (self.last_token_at - self.first_token_at) / decoded

    def _paced(self) -> Objective:
        """The objectives, `e2e_ms` turned into what it asks of the first token and of the mean of the others.

        Once the first token is there, that is exact: the rest of the time over the rest of `max_tokens`.
        Before, the first token may take what decoding as predicted leaves.
        """
        objective = self.submit.objective
        if objective.e2e_ms is None:
            return objective
        tpot_ms, ttft_ms, e2e_ms = objective.tpot_ms, objective.ttft_ms, objective.e2e_ms
        num_decoded = max(1, self.submit.sampling.max_tokens - 1 - self.num_resubmitted)
        if self.first_token_at is not None:
            taken_ms = 1e3 * (self.first_token_at - self.arrived)
        elif self.predicted is not None:
            taken_ms = max(e2e_ms - num_decoded * self.predicted.tpot_ms, self.predicted.ttft_ms)
            ttft_ms = taken_ms if ttft_ms is None else min(ttft_ms, taken_ms)
        else:
            taken_ms = 0.0
        left_ms = (e2e_ms - taken_ms) / num_decoded
        if left_ms > 0.0:  # else it is lost: nothing is gained by heeding it
            tpot_ms = left_ms if tpot_ms is None else min(tpot_ms, left_ms)
        return Objective(tpot_ms=tpot_ms, ttft_ms=ttft_ms)


def advance_all(requests: Iterable[Request], trigger: Trigger) -> None:
    """Move all of them to their next states, or raise IllegalTransition at the first that cannot."""
    after = _AFTER[trigger].get
    for request in requests:
        target = after(request.state)
        if target is None:
            request.advance(trigger)  # raises
        else:
            request.state = target
