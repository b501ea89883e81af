"""Arrays of several types in one piece of memory, so that one transfer brings them all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

#: Types of the host and of a device that are the same.
IN_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64, torch.bool: np.bool_}

Kind = tuple[Sequence[int], torch.dtype]
"""Shape and type of an array."""


def num_bytes(kinds: Sequence[Kind]) -> int:
    """Of arrays that lie one after the other."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in kinds)


def tensors_in(memory: torch.Tensor, kinds: Sequence[Kind]) -> list[torch.Tensor]:
    """Tensors in uint8 [bytes], one after the other; those of larger types first, or each may lie askew."""
    return [memory[place].view(dtype).view(*shape) for place, shape, dtype in _places(kinds)]


def arrays_in(memory: NDArray[np.uint8], kinds: Sequence[Kind]) -> list[NDArray[Any]]:
    """The same of the host's memory, where they may lie askew."""
    return [
        memory[place].view(IN_NUMPY[dtype]).reshape(tuple(shape)) for place, shape, dtype in _places(kinds)
    ]


def _places(kinds: Sequence[Kind]) -> Iterator[tuple[slice, Sequence[int], torch.dtype]]:
    start = 0
    for shape, dtype in kinds:
        end = start + num_bytes([(shape, dtype)])
        yield slice(start, end), shape, dtype
        start = end
