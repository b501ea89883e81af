"""The draft call and its answer (design, contract "Draft call")."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.draft_plan import DraftPlan as DraftPlan
from engine.proposals import Proposals
from engine.sampling_params import RequestSpec
from engine.stop_rules import StopRule
from engine.tree import TokenTree


class DraftItem(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """One request's part of a draft call.

    Attributes:
        request_id: the request.
        start: position in prompt and output of `tokens[0]`: how many tokens the drafter has heard of.
        tokens: int32 [new], the tokens committed since; the last one is the root of the tree.
        plan: shape of this draft.
        spec: opens the request; sent when `start` is 0, and then `tokens` is empty because
            `spec.tokens` holds them all.
        proposals: what the target's decoding heads proposed after these tokens, if they did
            (`Capabilities.num_candidates`).
    """

    request_id: str
    start: int
    tokens: NDArray[np.int32]
    plan: DraftPlan
    spec: RequestSpec | None = None
    proposals: Proposals | None = None


class DraftCall(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag="draft"):
    """Everything one drafter does in one step.

    Attributes:
        call_id: of this call.
        items: what to draft.
        release: requests to forget before that.
        stop_rule: looked at after every layer; where it says so, all trees of the call end. It does not ask
            whether to draft at all: the first layer is drafted. Drafters without probabilities ignore it.
        ahead_s: for how many seconds at most the drafter may go on computing likely continuations, unless its
            next call comes before; 0 if it may not.
    """

    call_id: int
    items: list[DraftItem]
    release: list[str] = []
    stop_rule: StopRule | None = None
    ahead_s: float = 0.0


class Draft(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """One request's candidate tree.

    Attributes:
        request_id: the request.
        tree: the candidates; root only if the plan's depth was 0 or nothing could be proposed.
        num_scored, num_agreed: of the committed tokens newly heard of (prompt excluded), how many the
            drafter scored while catching up, and how many it would have drafted itself (its first
            choice). This is the acceptance estimate that needs no target call (design, "Prefetch").
    """

    request_id: str
    tree: TokenTree
    num_scored: int = 0
    num_agreed: int = 0


class DraftResult(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag="drafted"):
    """Answer to a draft call.

    Attributes:
        call_id: of the call answered.
        drafts: one per item served.
        unknown: requests the drafter does not hold at the position named (it restarted, or evicted
            them for lack of slots); the scheduler reopens them with a spec.
        seconds: time from decoding the call to having the answer.
        forward_seconds: part of it spent in model forwards.
        num_forwards: model forwards run.
    """

    call_id: int
    drafts: list[Draft]
    unknown: list[str] = []
    seconds: float = 0.0
    forward_seconds: float = 0.0
    num_forwards: int = 0
