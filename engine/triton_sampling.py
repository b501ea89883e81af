"""Temperature, truncation and Gumbel noise on a GPU, by Triton, in two launches whatever the rows ask for.

Torch takes a hundred and more, most of them to compute Philox's words with 64-bit integers, which moves some
600 bytes per token; and it waits for the device to see how large a nucleus is.
"""

from __future__ import annotations

import importlib
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.devices import to_device
from engine.sampling_params import LEAST_DIVISOR, SamplingParams

_log = logging.getLogger(__name__)

#: Tokens that a program handles at a time; Philox makes four at once.
_TOKENS, _WARPS = 2048, 8
# A cut is one program a row, which passes over the row 19 times for top_p and waits for memory twice a block:
# so blocks are large. 1,024 threads may have 64 registers each.
_CUT_TOKENS, _CUT_WARPS = 8192, 32
_MASK64 = (1 << 64) - 1
#: Numbers that describe a row to the kernels, and which of them is its output position.
FIELDS, POSITION = 8, 2


def gumbel_by_triton(
    seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device
) -> torch.Tensor:
    """As `engine.noise.gumbel_noise`, in one launch."""
    kernels: Any = importlib.import_module("engine.sampling_kernels")
    out = torch.empty(len(seeds), vocab_size, dtype=torch.float32, device=device)
    words = np.array([positions, [seed & _MASK64 for seed in seeds]], dtype=np.uint64)
    about = to_device(torch.from_numpy(words.view(np.int64)), device)
    kernels.gumbel[len(seeds), -(-vocab_size // _TOKENS)](
        out, about[0], about[1], vocab_size, TOKENS=_TOKENS, num_warps=_WARPS
    )
    return out


def shape_by_triton(
    scores: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    perturbed: bool,
    in_place: bool = False,
) -> torch.Tensor:
    """Temperature, min_p, top_k and top_p of the rows that are sampled, and their noise.

    The highest score of a row becomes 0 before the noise. Greedy rows stay as they are. Does not wait for
    the device.

    Args:
        scores: float32 [n, vocab], logits after everything else that is done to them.
        params: n, of the rows.
        positions: n output positions, for the noise.
        perturbed: add the noise.
        in_place: overwrite `scores`.

    Returns:
        float32 [n, vocab]; tokens that were cut are -inf.
    """
    table = to_device(torch.from_numpy(described_rows(params, positions, scores.shape[1])), scores.device)
    return shape_rows(scores, table, perturbed=perturbed, in_place=in_place)


def shape_rows(
    scores: torch.Tensor, table: torch.Tensor, *, perturbed: bool, in_place: bool = False
) -> torch.Tensor:
    """`shape_by_triton` of rows whose `described_rows` the device has."""
    kernels: Any = importlib.import_module("engine.sampling_kernels")
    scores = scores.contiguous()
    rows, vocab = scores.shape
    keys = torch.empty(rows, dtype=torch.int32, device=scores.device)
    out = scores if in_place else torch.empty_like(scores)
    kernels.scale_and_find_cuts[(rows,)](
        scores, out, table, keys, vocab, TOKENS=_CUT_TOKENS, num_warps=_CUT_WARPS
    )
    kernels.cut_and_perturb[rows, -(-vocab // _TOKENS)](
        scores,
        out,
        table,
        table.view(torch.int64),
        keys,
        vocab,
        IS_PERTURBED=perturbed,
        TOKENS=_TOKENS,
        num_warps=_WARPS,
    )
    return out


def prepare_sampling(vocab_size: int, device: torch.device) -> None:
    """Compile the kernels for a vocabulary, seconds the first time, so that no request waits for that."""
    began = time.perf_counter()
    params = [SamplingParams(temperature=1.0, top_p=0.9, top_k=2)]
    scores = torch.zeros(1, vocab_size, device=device)
    for perturbed in (False, True):
        shape_by_triton(scores, params, [0], perturbed=perturbed)
    gumbel_by_triton([0], [0], vocab_size, device)
    _log.info("kernels for sampling are compiled, %.1f s", time.perf_counter() - began)


def described_rows(
    params: Sequence[SamplingParams], positions: Sequence[int], vocab: int
) -> np.ndarray[Any, Any]:
    """int32 [n, FIELDS], the table of `engine.sampling_kernels`: in column POSITION the output positions."""
    table = np.zeros((len(params), FIELDS), dtype=np.int32)
    table.view(np.uint64)[:, 0] = [one.seed & _MASK64 for one in params]
    table.view(np.uint32)[:, POSITION] = positions
    table[:, 3] = [one.top_k if 0 < one.top_k < vocab else 0 for one in params]
    numbers = table.view(np.float32)
    numbers[:, 4] = [0.0 if one.is_greedy else max(one.temperature, LEAST_DIVISOR) for one in params]
    numbers[:, 5] = [abs(math.log(one.min_p)) if one.min_p > 0.0 else math.inf for one in params]
    numbers[:, 6] = [one.top_p for one in params]
    return table
