"""The few best of a row of scores, for a vocabulary of thousands and a handful of choices."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.padded_segments import power_of_two
from engine.triton_support import runs_triton

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]

_BLOCK = 4096  # tokens that one program of Triton looks through


def best_tokens(logp: torch.Tensor, k: int) -> tuple[Float32, Int64]:
    """The `k` highest of each row and where they are; fewer if the rows are shorter.

    Args:
        logp: float32 [n, vocab], overwritten on a CPU.
        k: how many.

    Returns:
        (float32 [n, k], descending; int64 [n, k]), on the host.
    """
    k = min(k, logp.shape[1])
    return best_on_host(logp.numpy(), k) if logp.device.type == "cpu" else best_on_device(logp, k)


def highest(logp: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` highest of each row of float32 [n, vocab], ties to the lowest token, where `logp` is.

    `torch.topk` breaks ties as it likes. So it is given integers of which no two are equal: the bits of the
    score in the order of floats, and below them the token, lowest first. Does not wait for the device.

    Returns:
        (float32 [n, k], descending; int64 [n, k]).
    """
    vocab = logp.shape[1]
    bits = (logp + 0.0).view(torch.int32)  # minus zero becomes zero, which it ties with
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    keys |= torch.arange(vocab - 1, -1, -1, device=logp.device)
    best = torch.topk(keys, min(k, vocab), dim=-1).values
    token = (vocab - 1) - (best & 0xFFFFFFFF)
    return logp.gather(1, token), token


def highest_log_probabilities(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `highest` of the log-softmax of float32 [n, vocab], by Triton in two launches where that serves."""
    if runs_triton(scores.device):
        return highest_by_triton(scores, k)
    return highest(torch.log_softmax(scores, dim=-1), k)


def highest_by_triton(
    scores: torch.Tensor, k: int, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`highest_log_probabilities`, with the best of each block of tokens first, then the best of those.

    Scores of minus infinity give some token, again and again if there are fewer others than `k`. `out` is
    where both are to be put, for at most as many tokens as there are.
    """
    kernels: Any = importlib.import_module("engine.best_kernels")
    rows, vocab = scores.shape
    k, blocks, device = min(k, vocab), -(-vocab // _BLOCK), scores.device
    values = torch.empty(rows, blocks, k, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, blocks, k, dtype=torch.int32, device=device)
    weight = torch.empty(rows, blocks, 2, dtype=torch.float32, device=device)
    kernels.best_of_block[rows, blocks](
        scores.contiguous(), values, tokens, weight, vocab, blocks, k, BLOCK=_BLOCK, num_warps=8
    )
    if out is None:
        best = torch.empty(rows, k, dtype=torch.float32, device=device)
        token = torch.empty(rows, k, dtype=torch.int64, device=device)
    else:
        best, token = out
    kernels.best_of_blocks[(rows,)](
        values,
        tokens,
        weight,
        best,
        token,
        blocks,
        k,
        BLOCKS=power_of_two(blocks),
        CANDIDATES=power_of_two(blocks * k),
        num_warps=4,
    )
    return best, token


def best_on_device(logp: torch.Tensor, k: int) -> tuple[Float32, Int64]:
    """The `k` highest of each row of float32 [n, vocab], in one transfer and so one synchronisation."""
    best, token = highest(logp, k)
    values, ids = torch.stack((best.double(), token.double())).cpu()  # token ids are exact in float64
    return values.float().numpy(), ids.long().numpy()


def best_on_host(logp: Float32, k: int) -> tuple[Float32, Int64]:
    """The `k` highest of each row of float32 [n, vocab], which is overwritten; ties to the lowest token.

    Numpy's argmax is a vectorised scan, 16 times as fast as a row of torch.topk at a vocabulary of 4096, and
    k is small.
    """
    n = len(logp)
    row = np.arange(n)
    values = np.empty((n, k), dtype=np.float32)
    tokens = np.empty((n, k), dtype=np.int64)
    for choice in range(k):
        token = logp.argmax(axis=1)
        tokens[:, choice] = token
        values[:, choice] = logp[row, token]
        logp[row, token] = -np.inf
    return values, tokens
