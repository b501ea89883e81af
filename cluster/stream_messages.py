"""Messages between a front end and a cell, multiplexed over one connection (design, idea 7)."""

from __future__ import annotations

import msgspec

from engine.sampling_params import SamplingParams
from verifier.messages import TokenLogprobs


class Objective(msgspec.Struct, frozen=True, gc=False):
    """Latency objectives of a request, in milliseconds; None is no objective.

    Attributes:
        tpot_ms: mean time per output token after the first.
        ttft_ms: time to the first token.
        e2e_ms: time to the last token, when all of `max_tokens` come.
    """

    tpot_ms: float | None = None
    ttft_ms: float | None = None
    e2e_ms: float | None = None


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """On what terms a request may be served.

    Attributes:
        tier: service tier, which accounts and the share of the queue go by.
        objective: what is aimed at.
        priority: lower is earlier.
    """

    tier: str
    objective: Objective = Objective()
    priority: int = 0


class Prediction(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Latencies predicted when the request came, in milliseconds.

    Attributes:
        ttft_ms: time to the first token, waiting included.
        tpot_ms: mean time per output token after the first.
        e2e_ms: time to the last token, if all of `max_tokens` come.
    """

    ttft_ms: float
    tpot_ms: float
    e2e_ms: float

    def later(self, by_s: float) -> Prediction:
        """The same of a request that had waited so long before."""
        by_ms = 1e3 * by_s
        return Prediction(ttft_ms=self.ttft_ms + by_ms, tpot_ms=self.tpot_ms, e2e_ms=self.e2e_ms + by_ms)


class Tenant(msgspec.Struct, frozen=True):
    """Who competes with others for a cell: requests of one API key.

    Attributes:
        label: tells tenants apart, and nothing else; empty where there are no keys, or one.
        weight: share of the cell relative to other tenants' when all want more than they get.
    """

    label: str = ""
    weight: float = 1.0


#: Whoever is not told apart from others.
NOBODY = Tenant()


class Speculation(msgspec.Struct, frozen=True):
    """What a request allows speculation to do.

    Attributes:
        mode: "auto" lets the policy decide, "off" decodes without drafts.
        drafters: names it may use; empty allows all.
        max_tokens: most draft tokens verified per step; None leaves it to the policy.
        trace: whether every step tells its token tree (`StepTrace`).
    """

    mode: str = "auto"
    drafters: tuple[str, ...] = ()
    max_tokens: int | None = None
    trace: bool = False


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """When a request that has output had it; in seconds since it came to its front end.

    Attributes:
        first_token_s, last_token_s: of its tokens so far.
        sent_s: it was sent to the cell that goes on with it.
    """

    first_token_s: float
    last_token_s: float
    sent_s: float


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """A new request. `output` is empty unless the front end resubmits what was already committed.

    `on_miss` says what is done with it if it is predicted to miss `objective`: "serve" it all the same,
    "downgrade" it to the first of `downgrades` that it would meet, or "reject" it. `was_taken` says that a
    cell had accepted it, with or without output: it is then not held to a share of the queue again, and who
    sends it comes back by itself. `waited_s` is how long it was without a cell, or in the queue of another,
    that was lost or gave it back, if it has no output: its times, and when its first token is due, count from
    before that. If it has some, `resumed` says when it had it, and its objectives are judged by that.
    `adapter` is the name of the LoRA adapter that answers it, empty for none; keys and values of prompts are
    shared among requests of the same `cache_salt`. `assumed_tokens` is how much output is reckoned with at
    most, None for all of `max_tokens`: less where the client named no bound.
    """

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    output: list[int] = []
    objective: Objective = Objective()
    tier: str = "default"
    priority: int = 0
    speculation: Speculation = Speculation()
    on_miss: str = "serve"
    downgrades: tuple[Terms, ...] = ()
    tenant: Tenant = NOBODY
    was_taken: bool = False
    waited_s: float = 0.0
    resumed: Resumed | None = None
    adapter: str = ""
    cache_salt: str = ""
    assumed_tokens: int | None = None

    @property
    def num_reckoned(self) -> int:
        """Output tokens at most, as forecasts and tenants' charges reckon with them."""
        return self.sampling.max_tokens if self.assumed_tokens is None else self.assumed_tokens


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The client is gone, or has all the text it wants (a stop string matched): then it `is_complete`.

    Or nothing ends and the request `is_moved`: it waited here, and waits less at another cell.
    """

    request_id: str
    is_complete: bool = False
    is_moved: bool = False


class CancelMatching(msgspec.Struct, frozen=True, tag="cancel_matching"):
    """End requests of any front end; answered by `NumCancelled`.

    Attributes:
        ticket: repeated in the answer.
        prefix: what the ids of the requests begin with; not empty.
    """

    ticket: int
    prefix: str


class NumCancelled(msgspec.Struct, frozen=True, tag="num_cancelled"):
    """The answer to `CancelMatching`.

    Attributes:
        ticket: of the question.
        number: how many requests were ended; 0 if none was there.
    """

    ticket: int
    number: int


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What the cell did for a finished request; times in milliseconds on the scheduler's clock.

    Of a request that was resumed, times to and between tokens count from when it came to its front end.

    Attributes:
        queue_ms: arrival to first prefill chunk sent.
        ttft_ms: arrival to first committed token.
        tpot_ms: mean time per output token after the first; None below two tokens.
        e2e_ms: arrival to the last token.
        num_prompt_tokens, num_cached_tokens, num_output_tokens: token counts.
        num_steps: verify steps that committed tokens for it.
        num_drafted: candidate tokens drafted. num_verified: of those, sent to the target.
        num_accepted: of those, accepted.
        drafters: accepted tokens by drafter name (drafters that served it, also with 0 accepted).
        num_preemptions: how often its KV was given up and recomputed.
        acceptance_by_depth: accepted draft tokens at depth 1, 2, ...
        min_gap: smallest score gap between first and second choice over the output (see Verdict).
        terms: on which it was served; others than asked for if it was downgraded. None in older receipts.
        predicted: latencies predicted on arrival; None if there was nothing to predict from.
        preempted_ms: between losing its KV and its next token, before the first token and after it.
    """

    queue_ms: float
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_steps: int
    num_drafted: int
    num_verified: int
    num_accepted: int
    drafters: dict[str, int]
    num_preemptions: int
    acceptance_by_depth: list[int] = []
    min_gap: float = float("inf")
    terms: Terms | None = None
    predicted: Prediction | None = None
    preempted_ms: tuple[float, float] = (0.0, 0.0)


class StepTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The token tree of one request's step: what was drafted, of that verified, and of that accepted.

    Node 0 is the root, the last token before the step; `parents[i] < i` for every other node.

    Attributes:
        step: steps of the request that committed tokens, this one included.
        elapsed_ms: since the request came to the cell, on the scheduler's clock.
        drafter: who drafted the tree; empty if nobody drafted in time.
        tokens: vocabulary ids, one per node.
        parents: index of the parent of each node; -1 of the root.
        logps: sum of the drafter's log-probabilities from the root to each node.
        verified: nodes that the target verified, ascending; the root is one.
        accepted: nodes whose tokens were committed, in their order, the root left out.
        num_forced: how many of those, the last ones, the request's grammar added.
    """

    step: int
    elapsed_ms: float
    drafter: str
    tokens: list[int]
    parents: list[int]
    logps: list[float]
    verified: list[int]
    accepted: list[int]
    num_forced: int = 0


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Newly committed tokens of one request.

    Attributes:
        request_id: the request.
        position: output position of `tokens[0]`, so duplicates after a resubmission are recognised.
        tokens: committed tokens; may be empty with a finish reason.
        logprobs: one per token if asked for.
        prompt_logprobs: with the first output token, if asked for: one per prompt token after the first.
        finish_reason: None while it goes on; "stop", "length", "cancelled" or "error" at its end.
        receipt: with the finish reason.
        drafter: who proposed the accepted tokens of this step; empty without speculation.
        num_accepted: how many of `tokens`, from the first, were drafted (the rest are the target's own).
        trace: of the step, if the request asked for it.
        error: with the finish reason "error", for the client: why what it asked for cannot be had. Empty if
            the reason lies with the cell.
    """

    request_id: str
    position: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    finish_reason: str | None = None
    receipt: Receipt | None = None
    drafter: str = ""
    num_accepted: int = 0
    trace: StepTrace | None = None
    error: str = ""


class TokenBatch(msgspec.Struct, frozen=True, tag="tokens"):
    """All events of one step for one front end."""

    events: list[TokenEvent]


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag="rejected"):
    """The cell will not serve the request, and has not begun to.

    Attributes:
        request_id: the request.
        code: one of `cluster.admission.CODES`.
        message: for people.
        retry_after_s: when to come back, if that helps.
        predicted: what was predicted for it, if that is why.
    """

    request_id: str
    code: str
    message: str
    retry_after_s: float | None = None
    predicted: Prediction | None = None


ClientMessage = Submit | Cancel | CancelMatching
CellMessage = TokenBatch | Rejected | NumCancelled
