"""The verify call and its answer (design, contract "Verify call")."""

from __future__ import annotations

import msgspec

from engine.draft_plan import DraftPlan
from engine.proposals import Proposals
from engine.sampling_params import RequestSpec
from engine.stop_rules import StopRule
from engine.tree import TokenTree

SMALLEST_CHUNK = 16
"""A prefill item that does not fit takes a smaller chunk, but none so small that the step is not worth it."""


class VerifyItem(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """A fully prefilled request and its draft tree; the tree's root is its last committed token.

    Attributes:
        request_id: the request.
        tree: what is verified; None goes on from the last token the verifier knows, which a call that was
            not answered when this one was sent may have decided.
        num_candidates: best tokens wanted with the verdict of each decoding head, or layer of EAGLE's beam; 0
            leaves them out.
        num_heads: how many heads, from the first, or layers they are wanted of; None for all heads.
        least_logp: EAGLE drafts another layer only while the best path of some request's beam has at least
            this log-probability; heads do not ask.
        stop_token_logp: nor after a token that has less than this itself, given its parent.
        max_forced: most tokens that the request's grammar may add to the tree where it allows only one.
        plan: with no `tree`, the shape of one that is grown from what was proposed with the request's last
            verdict (`engine.proposed_growth.grown`), which a call that was not answered may bring.
    """

    request_id: str
    tree: TokenTree | None = None
    num_candidates: int = 0
    num_heads: int | None = None
    least_logp: float = float("-inf")
    stop_token_logp: float = float("-inf")
    max_forced: int = 0
    plan: DraftPlan | None = None

    @property
    def num_nodes(self) -> int:
        """Of the tree: a row of the forward each; at most, where that is yet to be grown."""
        if self.tree is not None:
            return len(self.tree)
        return 1 if self.plan is None else 1 + self.plan.depth * self.plan.width


class PrefillItem(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """A chunk of a request still being prefilled.

    The verifier computes up to `num_tokens` more of the tokens it knows (after any prefix found in its
    cache). When that completes the sequence, the same forward also decides the next token.

    Attributes:
        request_id: the request.
        num_tokens: most prompt tokens to compute in this step (at least 1).
        spec: opens the request; sent with its first chunk, also after a preemption.
        num_candidates, num_heads, least_logp, stop_token_logp: as of `VerifyItem`, if this step completes the
            sequence.
    """

    request_id: str
    num_tokens: int
    spec: RequestSpec | None = None
    num_candidates: int = 0
    num_heads: int | None = None
    least_logp: float = float("-inf")
    stop_token_logp: float = float("-inf")


class VerifyCall(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag="verify"):
    """One step of the target: `release` frees requests first, then all items share one forward.

    Attributes:
        call_id: of this call.
        verify, prefill: one item per request.
        release: requests to forget before that.
        stop_rule: EAGLE asks it after every layer; where it says so, all beams end. It does not ask whether
            to draft at all: the first layer is drafted. Heads do not ask.
    """

    call_id: int
    verify: list[VerifyItem] = []
    prefill: list[PrefillItem] = []
    release: list[str] = []
    stop_rule: StopRule | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probability of a committed token and of the most probable alternatives.

    They are of the model's distribution before temperature, penalties and truncation, as vLLM's
    default `raw_logprobs`.
    """

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]
    rank: int = 0  # among all tokens, from 1


class Verdict(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """What became of one request's tree.

    Attributes:
        request_id: the request.
        tokens: newly committed: the accepted path and one bonus token; cut after the first stop token
            or at `max_tokens`.
        num_accepted: how many of the tree's drafted nodes were accepted (before the cut).
        nodes: indices of the accepted nodes in the draft tree, in order, root excluded.
        logprobs: one per token if the request asked for them, else empty.
        min_gap: smallest difference between the best and second-best score among the decided tokens;
            a near tie (below 1e-4) is where another batch shape may round to the other token. Such are also
            tokens at the edge of `min_p`, `top_k` or `top_p`, which this does not show.
        proposals: what the decoding heads propose after the last of `tokens`, if that was asked for, the
            target has heads, and the request goes on.
        num_forced: tokens that the request's grammar added to the tree.
        num_forced_accepted: how many of those were accepted, after the drafted ones.
        is_slow: whether its grammar takes so much work that it should be drafted for no more.
        error: why the request cannot go on: its grammar takes more work than the limits allow. Else empty.
        is_broken: whether it cannot go on because the model gave no numbers for it, which is logged.
    """

    request_id: str
    tokens: list[int]
    num_accepted: int = 0
    nodes: list[int] = []
    logprobs: list[TokenLogprobs] = []
    min_gap: float = float("inf")
    proposals: Proposals | None = None
    num_forced: int = 0
    num_forced_accepted: int = 0
    is_slow: bool = False
    error: str = ""
    is_broken: bool = False


class PrefillProgress(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """How far one request's prefill came.

    Attributes:
        request_id: the request.
        num_computed: tokens of its sequence now in the KV cache.
        num_cached: how many of those came from a shared prefix (set with the first chunk).
        verdict: the first decided token, once the sequence is complete.
        prompt_logprobs: of the prompt tokens that follow those computed in this step, if the request asks
            for them: of the second token and so on in the first step, going on from there in later ones.
    """

    request_id: str
    num_computed: int
    num_cached: int = 0
    verdict: Verdict | None = None
    prompt_logprobs: list[TokenLogprobs] = []


class VerifyResult(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag="verified"):
    """Answer to a verify call.

    Attributes:
        call_id: of the call answered.
        verdicts: one per verify item served.
        prefills: one per prefill item served.
        deferred: requests left untouched because the KV pool had no slots for them in this step, or for the
            end of their prompt in the one before; the scheduler preempts somebody and asks again.
        unknown: requests the verifier does not hold (it restarted); the scheduler reopens them.
        free_slots: slots available to the next call, shared prefixes that can be evicted included.
        num_tokens: rows in the forward pass.
        key_tokens: keys that attention read for them, padding left out, in each layer.
        padded_tokens: keys of padding that it read besides.
        seconds: time from decoding the call to having the answer; of one that was begun while another was
            computed, from the answer to that.
        forward_seconds: part of it spent in the model's forward.
        digest: checksum of all committed tokens; tensor-parallel ranks must agree on it.
    """

    call_id: int
    verdicts: list[Verdict] = []
    prefills: list[PrefillProgress] = []
    deferred: list[str] = []
    unknown: list[str] = []
    free_slots: int = 0
    num_tokens: int = 0
    key_tokens: int = 0
    padded_tokens: int = 0
    seconds: float = 0.0
    forward_seconds: float = 0.0
    digest: int = 0
