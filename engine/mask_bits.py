"""Masks of tokens: one bit each, int32 [ceil(vocab / 32)], lowest bit first."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

TokenMask = NDArray[np.int32]


def holds(mask: TokenMask, token: int) -> bool:
    """Whether a mask allows a token."""
    return bool((int(mask[token >> 5]) >> (token & 31)) & 1)


def only_token(mask: TokenMask) -> int | None:
    """The one token that a mask allows; None if there are more."""
    words = mask.view(np.uint32)
    if np.count_nonzero(words) != 1:
        return None
    where = int(words.argmax())
    word = int(words[where])
    return None if word & (word - 1) else where * 32 + word.bit_length() - 1


def without(mask: TokenMask, tokens: Iterable[int]) -> TokenMask:
    """A mask that allows none of `tokens`."""
    result = mask.copy()
    words = result.view(np.uint32)
    for token in tokens:
        if 0 <= token < 32 * len(words):
            words[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
    return result


def tokens_in(mask: TokenMask) -> list[int]:
    """The tokens that a mask allows."""
    found: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return found
