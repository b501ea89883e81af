"""Applying masks of allowed tokens, one bit per token, to rows of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.devices import to_device


def mask_out_(work: torch.Tensor, which: Sequence[int], masks: Sequence[NDArray[np.int32]]) -> None:
    """Tokens not allowed to -inf, in place.

    Args:
        work: float32 [n, vocab].
        which: rows with a mask.
        masks: per such row int32 [words], 32 tokens a word, lowest bit first; tokens beyond are not allowed.
    """
    n, vocab = len(which), work.shape[1]
    words = np.stack(masks)
    if work.is_cuda:  # an eighth of the bytes to send
        packed = to_device(torch.from_numpy(words), work.device)
        shifts = torch.arange(32, dtype=torch.int32, device=work.device)
        bits = ((packed.unsqueeze(-1) >> shifts) & 1).view(n, -1)[:, :vocab].bool()
    else:
        unpacked = np.unpackbits(words.view(np.uint8), axis=1, count=vocab, bitorder="little")
        bits = torch.from_numpy(unpacked.view(np.bool_))
    if bits.shape[1] < vocab:
        bits = torch.nn.functional.pad(bits, (0, vocab - bits.shape[1]))
    if n == len(work):
        work.masked_fill_(~bits, -math.inf)
    else:
        rows = to_device(torch.tensor(which), work.device)
        work.index_copy_(0, rows, work[rows].masked_fill_(~bits, -math.inf))
