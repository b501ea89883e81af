"""Context lengths for the decomposition benchmark: a built-in distribution, or those of a file."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

SHORTEST, LONGEST = 32, 2048
MEDIAN, SIGMA = 512.0, 0.9

Draw = Callable[[np.random.Generator, int], list[int]]
"""So many context lengths, in tokens."""

# Names of the number of prompt tokens, and of the output's, in the traces of Azure (CSV) and Mooncake (JSON
# lines).
_COLUMNS = (("ContextTokens", "GeneratedTokens"), ("input_length", "output_length"))


def source(path: Path | None) -> Draw:
    """Lengths of a file, or lognormal ones of median 512 and sigma 0.9; cut to between 32 and 2048.

    Raises:
        ValueError: if the file has no lengths.
        OSError: if it cannot be read.
    """
    if path is None:
        return lambda rng, n: _cut(rng.lognormal(np.log(MEDIAN), SIGMA, n))
    held = read_lengths(path)
    return lambda rng, n: _cut(rng.choice(held, n))


def _cut(lengths: np.ndarray) -> list[int]:
    cut: list[int] = np.clip(lengths, SHORTEST, LONGEST).astype(int).tolist()
    return cut


def read_lengths(path: Path) -> list[int]:
    """Context lengths of an Azure (CSV) or Mooncake (JSON lines) trace, or of a file of one number a line.

    Of traces, prompt and half of the output: where a request is on average.

    Raises:
        ValueError: if it is none of these, or empty.
        OSError: if it cannot be read.
    """
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty")
    try:
        if lines[0].lstrip().startswith("{"):
            return [_context(json.loads(line)) for line in lines]
        if "," in lines[0]:
            return [_context(row) for row in csv.DictReader(lines)]
        return [int(line) for line in lines]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} has no context lengths: {error}") from None


def _context(row: dict[str, str | int]) -> int:
    for prompt, output in _COLUMNS:
        if prompt in row:
            return int(row[prompt]) + int(row.get(output) or 0) // 2
    raise KeyError(f"neither {' nor '.join(name for name, _ in _COLUMNS)} in a row")
