"""Noise that is a function of a key and a counter, so that it does not depend on who asks, or when.

The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) applied to `key + counter * golden ratio`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

Float64 = NDArray[np.float64]
UInt64 = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


def key_of(*parts: int) -> int:
    """One 64-bit key out of several numbers (a seed, a stream, a drafter's index)."""
    key = 0
    for part in parts:
        key = (key + part * 0x2545F4914F6CDD1D + _GOLDEN) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key


def bits(key: int, start: int, count: int) -> UInt64:
    """uint64 [count]: 64 random bits for each counter from `start` on."""
    counter = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    value = counter * np.uint64(_GOLDEN) + np.uint64(key)
    value = (value ^ (value >> _S30)) * _FIRST
    value = (value ^ (value >> _S27)) * _SECOND
    mixed: UInt64 = value ^ (value >> _S31)
    return mixed


def uniform(key: int, start: int, count: int) -> Float64:
    """float64 [count]: uniform in the open interval (0, 1), one for each counter from `start` on."""
    values: Float64 = ((bits(key, start, count) >> _S11).astype(np.float64) + 0.5) * 2.0**-53
    return values


def normal(key: int, start: int, count: int) -> Float64:
    """float64 [count]: standard normal, one for each counter from `start` on."""
    values: Float64 = ndtri(uniform(key, start, count))
    return values
