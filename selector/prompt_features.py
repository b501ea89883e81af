"""What kind of prompt a prompt is, as a short vector: a randomly projected bag of its tokens.

Token counts in a vocabulary of any size are hashed (Weinberger et al., 2009) and projected to a few
dimensions by a fixed random matrix, which keeps angles (Johnson and Lindenstrauss, 1984). Prompts made from
one template share their first or last tokens, so those count once more with their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

DIMENSIONS = 64
# Rows of the random projection; tokens that share one are not told apart.
BUCKETS = 1 << 14
# Tokens at either end that count with their places.
ENDS = 4
# Weight of those beside that of the bag.
END_WEIGHT = 2.0
# Longer prompts are judged by their two ends, so that the cost is bounded.
MOST_TOKENS = 1024
_SEED = 20090618


class PromptFeatures:
    """Maps prompts to unit vectors, the same in every process, with a constant 1 appended."""

    def __init__(self) -> None:
        self._projection, self._places = _tables()

    @property
    def size(self) -> int:
        """Length of a feature vector."""
        return DIMENSIONS + 1

    def of(self, prompt: Sequence[int], labels: Sequence[str] = ()) -> Float64:
        """The features of a prompt.

        Args:
            prompt: token ids.
            labels: anything else known of the request that may say what it asks for, such as its tier.

        Returns:
            float64 [size]: a unit vector (zeros for an empty prompt without labels), then 1.
        """
        features = np.zeros(self.size)
        features[-1] = 1.0
        if len(prompt) > MOST_TOKENS:
            half = MOST_TOKENS // 2
            prompt = [*prompt[:half], *prompt[-half:]]
        total = np.zeros(DIMENSIONS, dtype=np.float32)
        if len(prompt):
            tokens = np.array(prompt, dtype=np.int64)
            rows, counts = np.unique(_row(tokens, 0x9E3779B1), return_counts=True)
            # Roots, so that a token that fills the prompt does not hide the others.
            bag = np.sqrt(counts, dtype=np.float32) @ self._projection[rows]
            total += bag / np.float32(np.sqrt(len(tokens)))
            ends = np.concatenate([tokens[:ENDS], tokens[: -ENDS - 1 : -1]])
            first = min(ENDS, len(tokens))
            places = np.concatenate([self._places[:first], self._places[ENDS : ENDS + first]])
            total += self._projection[_row(ends, places)].sum(axis=0) * np.float32(
                END_WEIGHT / np.sqrt(2 * ENDS)
            )
        for label in labels:
            total += self._projection[crc32(label.encode()) % BUCKETS]
        norm = float(np.sqrt(total @ total))
        if norm > 0.0:
            features[:-1] = total / norm
        return features


@cache
def _tables() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The projection, and distinct odd multipliers that scatter tokens at each place to rows of their own."""
    rng = np.random.default_rng(_SEED)
    projection = rng.standard_normal((BUCKETS, DIMENSIONS), dtype=np.float32)
    return projection, 2 * rng.integers(1 << 30, 1 << 40, 2 * ENDS) + 1


def _row(tokens: NDArray[np.int64], multiplier: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """Multiplicative hashing to the high bits, modulo the number of rows."""
    rows: NDArray[np.int64] = ((tokens + 1) * multiplier >> 17) % BUCKETS
    return rows
