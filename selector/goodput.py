"""Tokens per second a drafter promises (SmartSpec's goodput) and the depth that brings them."""

from __future__ import annotations


def best_goodput(
    rate: float, layer_s: float, verify_s: float, token_s: float, max_depth: int, *, is_drafted: bool = False
) -> float:
    """Best tokens per second over draft depths: l(a, d) / (verify + d * (layer + token)).

    Args:
        rate: acceptance rate.
        layer_s: seconds per drafted layer.
        verify_s: seconds of a verify step without drafts.
        token_s: seconds one more verified token adds.
        max_depth: deepest draft; at 0, and where no depth pays, it is the goodput without drafts.
        is_drafted: whether to choose among depths from 1 on, so that drafters are told apart also where none
            pays.
    """
    per_layer_s = layer_s + token_s
    tokens, chance, seconds = 1.0, 1.0, verify_s
    best = 0.0 if is_drafted and max_depth else tokens / seconds
    for _ in range(max_depth):
        chance *= rate
        tokens += chance
        seconds += per_layer_s
        if tokens < best * seconds:
            break  # the curve has one peak: past it every further layer costs more than it yields
        best = tokens / seconds
    return best
