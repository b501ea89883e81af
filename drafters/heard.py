"""What a drafter has heard of one request: reading a draft item against it."""

from __future__ import annotations

from dataclasses import dataclass

from drafters.messages import DraftItem
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


def committed(heard: Heard | None, item: DraftItem) -> list[int] | None:
    """All committed tokens of the item's request, or None if this drafter lacks some of them.

    The item names a position. One that is behind what was heard is no error: a worker that answered
    late, or a scheduler that rolled back, resends tokens, and those replace what was heard from there on.
    """
    if item.spec is not None:
        return list(item.spec.tokens) or None
    if heard is None or not 0 <= item.start <= len(heard.tokens):
        return None
    new: list[int] = item.tokens.tolist()
    return heard.tokens[: item.start] + new or None


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens `a` and `b` share."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(i for i in range(shorter) if a[i] != b[i])
