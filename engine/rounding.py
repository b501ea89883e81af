"""Rounds weights of floats to numbers of few bits."""

from __future__ import annotations

import torch
from torch import nn

from engine import fp8, integer_weight
from engine.fp8_module import StoredFp8Linear
from engine.integer_module import StoredIntegerLinear
from engine.quantization import Quantization
from engine.quantized_linear import QuantizedWeight
from engine.separated_experts import separated
from engine.stored_linear import StoredLinear, layers_of


def rounded(weight: torch.Tensor, quantization: Quantization) -> QuantizedWeight:
    """A float matrix [outputs, inputs] in so many bits, where it lies."""
    return fp8.quantized(weight) if quantization == "fp8" else integer_weight.quantized(weight)


def round_linears(
    model: nn.Module,
    quantization: Quantization,
    *,
    keep: nn.Module | None = None,
    device: torch.device | None = None,
) -> int:
    """Put `StoredLinear` in the place of a model's linear layers, but of `keep`; returns of how many.

    Layers of experts are among them, where these can be taken apart.

    What the model computes afterwards is what it is: another model than before. Each weight is rounded on
    `device`, where it is by default, and stays where it was.
    """
    num_rounded = 0
    for experts in separated(model):  # one after the other: floats of all take more than the model did
        num_rounded += _round(experts, quantization, None, device)
    return num_rounded + _round(model, quantization, keep, device)


def _round(
    module: nn.Module, quantization: Quantization, keep: nn.Module | None, device: torch.device | None
) -> int:
    layers = [
        (parent, name, child)
        for parent, name, child in layers_of(module)
        if type(child) is nn.Linear and child is not keep
    ]
    for parent, name, child in layers:
        weight = rounded(child.weight.detach().to(device), quantization).to(child.weight.device)
        setattr(parent, name, _stored(weight, child.bias))
    return len(layers)


def _stored(weight: QuantizedWeight, bias: torch.Tensor | None) -> StoredLinear:
    if not isinstance(weight, fp8.Fp8Weight):
        return StoredIntegerLinear(weight, bias)
    # One scale per output and block would be stored 128 times.
    scales = weight.scales[:: fp8.BLOCK].contiguous()
    return StoredFp8Linear(weight.numbers.view(torch.float8_e4m3fn), scales, bias)
