"""Mixtures of a runner compared, one by one, with the Transformers modules that they were made of.

In half precision rounding alone sends some rows to other experts, after which nothing is alike. Forwards can
then be compared for most rows at best, and for a few rows not at all. Of a layer by itself rows can be
chosen that no rounding sends elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from engine.grouped_experts import GroupedExperts, rows_with_other_tiles
from engine.llama_weights import LlamaWeights
from engine.mixture import Mixture
from engine.unsupported_model import UnsupportedModel

# As decoding has them: one, some, and more than there are experts in small mixtures.
_ROWS = (1, 3, 24)
# Rows are drawn from so many times as many, and some more: those whose last expert is the surest.
_DRAWN_TIMES, _DRAWN = 2, 64
# Of the largest number.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@torch.inference_mode()
def check_mixtures(weights: LlamaWeights, model: PreTrainedModel) -> None:
    """Compare the first and the last mixture, for all numbers of rows that are computed in ways of their own.

    On GPUs that has kernels for all of these compiled. With tensor parallelism all ranks must do so at the
    same time.

    Args:
        weights: of the runner.
        model: the same model, on any device.

    Raises:
        UnsupportedModel: if they differ.
    """
    mixtures = [(index, layer.mlp) for index, layer in enumerate(weights.layers)]
    found = [(index, mlp) for index, mlp in mixtures if isinstance(mlp, Mixture)]
    for index, mixture in dict(found[:1] + found[-1:]).items():
        module = model.base_model.layers[index].mlp
        for rows in _numbers_of(mixture, module):
            _check(weights, mixture, module, rows, f"layer {index}")


def _numbers_of(mixture: Mixture, module: Any) -> Iterable[int]:
    if not isinstance(mixture.experts, GroupedExperts):
        return _ROWS
    return sorted(
        {*_ROWS, *rows_with_other_tiles(mixture.experts.num_experts, module.gate.top_k, mixture.gain.dtype)}
    )


def _check(weights: LlamaWeights, mixture: Mixture, module: Any, rows: int, where: str) -> None:
    router = module.gate.weight
    x = _clear_rows(router.float(), module.gate.top_k, rows).to(router.dtype)
    if weights.adapters is not None:
        weights.adapters.begin(None)
    got = mixture(x.to(weights.device))
    if weights.group is not None:
        torch.distributed.all_reduce(got, group=weights.group)
    expected = module(x.unsqueeze(0))[0].float().to(got.device)
    error = float((got.float() - expected).abs().max())
    if not error <= _TOLERANCE[router.dtype] * float(expected.abs().max()):
        raise UnsupportedModel(
            f"self-test failed at the mixture of {where}: of {rows} rows some are {error:.3g} off what "
            f"Transformers makes of them, which are up to {float(expected.abs().max()):.3g}"
        )


def _clear_rows(router: torch.Tensor, per_row: int, rows: int) -> torch.Tensor:
    """Random rows, float32 [rows, hidden], whose experts are likelier than the others by the most."""
    generator = torch.Generator().manual_seed(rows)
    drawn = torch.randn(_DRAWN_TIMES * rows + _DRAWN, router.shape[1], generator=generator)
    x = drawn.to(router.device)
    ordered = F.linear(x, router).sort(dim=1, descending=True).values
    if per_row >= ordered.shape[1]:
        return x[:rows]
    margins = ordered[:, per_row - 1] - ordered[:, per_row]
    return x[margins.topk(rows).indices]
