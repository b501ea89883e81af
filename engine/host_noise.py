"""Philox's words and their Gumbel noise on a CPU, by numpy: what `engine.noise` defines, in half the time.

What torch takes for each operation is most of the time of a row or two, which is what a step of one request
has; its logarithms in float64 are several times as slow as numpy's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

UInt32 = NDArray[np.uint32]
UInt64 = NDArray[np.uint64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

#: Of Philox4x32-10: what the even words are multiplied by, what is added to the key after a round, rounds.
MULTIPLIERS, WEYL, ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10
_FIRST, _SECOND = np.array(MULTIPLIERS, dtype=np.uint64)
_WEYL = np.array(WEYL, dtype=np.uint64)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
# Counters at a time: their arrays of 64-bit words are to stay in a core's second-level cache.
_MOST_COUNTERS = 32_768


def words(seeds: Sequence[int], positions: Sequence[int], vocab_size: int) -> UInt32:
    """uint32 [n, vocab], word `v % 4` of Philox4x32-10 with counter (v // 4, position, 0, 0), by seed.

    Args:
        seeds: n keys; taken modulo 2**64.
        positions: n, below 2**32.
        vocab_size: tokens per row.
    """
    blocks = -(-vocab_size // 4)
    out = np.empty((len(seeds), blocks, 4), dtype=np.uint32)
    keys = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    rows = np.array(positions, dtype=np.uint64)
    first = np.arange(blocks, dtype=np.uint64) * _FIRST
    step = max(1, _MOST_COUNTERS // max(1, blocks))
    for start in range(0, len(seeds), step):
        part = slice(start, start + step)
        _fill(out[part], keys[part, None], rows[part, None], first)
    return out.reshape(len(seeds), blocks * 4)[:, :vocab_size]


def _fill(out: UInt32, key: UInt64, position: UInt64, product: UInt64) -> None:
    """All rounds of some rows; `product` is what the first makes of each counter's first word."""
    one, other = key & _LOW, key >> _HALF
    # Words 2 and 3 of the counters are zero: after the first round words 0 and 1 are one number a row.
    even = position ^ one
    third = (product >> _HALF) ^ other
    one, other = (one + _WEYL[0]) & _LOW, (other + _WEYL[1]) & _LOW
    left, right = even * _FIRST, third * _SECOND
    word0, word1 = (right >> _HALF) ^ one, right
    word2 = product ^ ((left >> _HALF) ^ other)
    word3 = np.broadcast_to(left, word2.shape)
    word0 &= _LOW
    word2 &= _LOW
    # The low half of a product is the next odd word; what is above it is masked off where it goes to.
    for _ in range(ROUNDS - 2):
        one, other = (one + _WEYL[0]) & _LOW, (other + _WEYL[1]) & _LOW
        left, right = word0 * _FIRST, word2 * _SECOND
        np.right_shift(right, _HALF, out=word0)
        word0 ^= word1
        word0 ^= one
        word0 &= _LOW
        np.right_shift(left, _HALF, out=word2)
        word2 ^= word3
        word2 ^= other
        word2 &= _LOW
        word1, word3 = right, left
    out[:, :, 0], out[:, :, 2] = word0, word2
    out[:, :, 1], out[:, :, 3] = word1 & _LOW, word3 & _LOW


def uniform(seeds: Sequence[int], positions: Sequence[int], vocab_size: int) -> Float64:
    """As `engine.noise.uniform_noise`."""
    numbers = words(seeds, positions, vocab_size).astype(np.float64)
    numbers += 0.5
    numbers *= 2.0**-32
    return numbers


def gumbel(seeds: Sequence[int], positions: Sequence[int], vocab_size: int) -> Float32:
    """As `engine.noise.gumbel_noise`."""
    numbers = uniform(seeds, positions, vocab_size)
    for _ in range(2):
        np.log(numbers, out=numbers)
        np.negative(numbers, out=numbers)
    return numbers.astype(np.float32)
