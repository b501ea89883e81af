"""The shape of one request's draft: how deep, how wide, where it ends."""

from __future__ import annotations

import msgspec


class DraftPlan(msgspec.Struct, frozen=True, gc=False):
    """The shape drafting may take for one request in one step.

    Attributes:
        depth: layers below the root; 0 catches up on committed tokens without drafting (a prefetch).
        width: nodes per layer (beam width); 1 drafts a chain.
        stop_logp: a layer whose best path log-probability falls below this ends the draft early;
            the default never does.
        stop_token_logp: a token whose own log-probability, given its parent, falls below this stays in the
            tree but is not extended; the default extends all. Drafters without probabilities ignore it.
        least_forward_logp: a layer that takes a forward is drafted only if the best path it would extend has
            at least this log-probability; what was computed ahead is taken whatever it has.
    """

    depth: int
    width: int = 1
    stop_logp: float = float("-inf")
    stop_token_logp: float = float("-inf")
    least_forward_logp: float = float("-inf")
