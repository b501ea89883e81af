"""What a drafter has heard of one request: reading draft items against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drafters.messages import DraftItem, DraftPlan
from drafters.protocol import Capabilities
from engine.sampling_params import RequestSpec


@dataclass(slots=True)
class Heard:
    """The committed tokens one drafter knows of one request.

    Attributes:
        spec: as the request was opened; its `tokens` are those at opening, `tokens` below grows.
        tokens: prompt and output committed so far.
    """

    spec: RequestSpec
    tokens: list[int]


def news(heard: Heard | None, item: DraftItem) -> tuple[int, list[int]] | None:
    """What the item changes of what was heard: the tokens that stay valid, and those that follow them.

    A position behind the last token heard is no error: a scheduler that lost an answer sends tokens again,
    and they replace what was heard from there on as far as they differ.

    Returns:
        (how many of `heard.tokens` stay, the tokens after those); None if the drafter lacks tokens before
        the item's, or nothing would be left.
    """
    if item.spec is not None:
        return (0, list(item.spec.tokens)) if item.spec.tokens else None
    if heard is None or not 0 <= item.start <= len(heard.tokens):
        return None
    new: list[int] = item.tokens.tolist()
    same = _common_prefix(heard.tokens[item.start :], new)
    kept = item.start + same
    return (kept, new[same:]) if kept or new else None


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens `a` and `b` share."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def fit_plan(plan: DraftPlan, heard: Heard, capabilities: Capabilities) -> DraftPlan:
    """The plan within what the drafter can do, the context it can follow, and what is left to generate."""
    length = len(heard.tokens)
    left = heard.spec.prompt_len + heard.spec.sampling.max_tokens - length
    depth = min(
        plan.depth,
        capabilities.max_depth,
        capabilities.max_tokens - length,
        left - 1,  # verification adds one token of its own to the path it accepts
    )
    return DraftPlan(
        depth=max(0, depth),
        width=max(1, min(plan.width, capabilities.max_width)),
        stop_logp=plan.stop_logp,
        stop_token_logp=plan.stop_token_logp,
        least_forward_logp=plan.least_forward_logp,
    )
