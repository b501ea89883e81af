"""What every drafter is: capabilities as data, and one call."""

from __future__ import annotations

from typing import Protocol

import msgspec

from drafters.messages import DraftCall, DraftResult


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a drafter can do. Callers branch on these, never on a drafter's type.

    Attributes:
        kind: "model", "prompt_lookup", ...
        max_depth: deepest draft it makes.
        max_width: widest beam; 1 means chains only.
        has_probabilities: whether `logp` in its trees comes from a model.
        needs_prefill: whether catching up on a prompt costs it a forward pass.
        num_candidates: how many of each layer's best tokens it drafts from, which are proposed beside the
            target and come with its verdicts; 0 if it needs none, and then none are made for its requests.
        has_independent_layers: whether those of a layer are the same whatever path leads to them, as decoding
            heads' are.
        vocab_size: size of the vocabulary its tokens come from.
        max_tokens: longest sequence (prompt and output) it can follow.
        num_slots: tokens its KV cache holds; 0 if it keeps none.
        num_parameters: of its model; 0 if it has none.
    """

    kind: str
    max_depth: int
    max_width: int
    has_probabilities: bool
    needs_prefill: bool
    vocab_size: int
    max_tokens: int
    num_slots: int = 0
    num_parameters: int = 0
    num_candidates: int = 0
    has_independent_layers: bool = False


class Drafter(Protocol):
    """Proposes candidate token trees for a batch of requests, and holds per-request state for it."""

    @property
    def capabilities(self) -> Capabilities:
        """What this drafter can do."""
        ...

    def draft(self, call: DraftCall) -> DraftResult:
        """Draft for every item of the call; never raises for one request's sake (see `unknown`)."""
        ...

    def draft_ahead(self) -> bool:
        """A short piece of work, done between calls, that makes the next draft sooner ready.

        It changes what the next call costs and nothing else.

        Returns:
            whether there may be more of it.
        """
        ...
