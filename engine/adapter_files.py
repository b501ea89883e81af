"""The weights of LoRA adapters as PEFT saves them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from engine.adapter_config import WEIGHTS, UnsuitableAdapter, read_adapter_config
from engine.devices import CPU
from engine.unsupported_model import UnsupportedModel

#: What PEFT writes in front of the base model's own names, and behind them for both halves (A, B).
PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """What is added to a linear layer's output for an input x: `up @ (down @ x)`; the scale is in `up`.

    `down` is float32 [rank, inputs] (PEFT's A), `up` float32 [outputs, rank] (its B).
    """

    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A LoRA adapter (Hu et al., arXiv 2106.09685).

    Attributes:
        name: by which requests ask for it.
        directory: where it lies.
        modules: by the names of the model's linear layers, as Transformers calls them.
    """

    name: str
    directory: Path
    modules: Mapping[str, LowRank]

    @property
    def rank(self) -> int:
        """Of the module with the highest."""
        return max(len(one.down) for one in self.modules.values())

    def low_rank_of(self, module: str, shape: tuple[int, ...]) -> LowRank | None:
        """What it adds to a layer whose weight has this shape, (outputs, inputs); None for nothing.

        Raises:
            UnsupportedModel: if it is of a layer of another shape.
        """
        low = self.modules.get(module)
        own = shape if low is None else (len(low.up), low.down.shape[1])
        if own != shape:
            raise UnsupportedModel(
                f"adapter {self.name!r} is another model's: `{module}` is {shape} here, and {own} there"
            )
        return low


def read_adapter(name: str, directory: Path) -> Adapter:
    """Read a directory that PEFT has saved, on the CPU.

    Raises:
        UnsupportedModel: if there is none, it is broken, or what it says is not all sums of low rank.
    """
    try:
        config = read_adapter_config(directory)
    except UnsuitableAdapter as error:
        raise UnsupportedModel(f"adapter {name!r}: {error}") from None
    return Adapter(name, directory, _modules(directory / WEIGHTS, config))


def starts_of(ranks: Sequence[int]) -> list[int]:
    """The first column of each adapter, where those of all lie beside each other."""
    return [sum(ranks[:number]) for number in range(len(ranks))]


def side_by_side(adapters: Mapping[int, LowRank], ranks: Sequence[int]) -> LowRank:
    """What several adapters, by their numbers from 1, add to a layer as one: each has its columns of all."""
    first = next(iter(adapters.values()))
    down = torch.zeros(sum(ranks), first.down.shape[1], device=CPU)
    up = torch.zeros(len(first.up), sum(ranks), device=CPU)
    for number, low in adapters.items():
        start = starts_of(ranks)[number - 1]
        own = slice(start, start + len(low.down))
        down[own], up[:, own] = low.down, low.up
    return LowRank(down, up)


@torch.no_grad()
def merge(model: nn.Module, adapter: Adapter) -> None:
    """Put an adapter into a model's weights themselves, in place: W + B A for each W that it changes.

    Raises:
        AttributeError: where the model has no such layer.
    """
    for name, low in adapter.modules.items():
        weight = model.get_submodule(name).get_parameter("weight")
        weight.add_((low.up.double() @ low.down.double()).to(weight.device, weight.dtype))


def _modules(file: Path, config: Mapping[str, Any]) -> dict[str, LowRank]:
    found: dict[str, LowRank] = {}
    try:
        with safe_open(file, framework="pt") as stored:
            names = set(stored.keys())
            for name in sorted(names):
                if not name.startswith(PREFIX) or not name.endswith((DOWN, UP)):
                    raise UnsupportedModel(
                        f"`{name}` in {file} is no part of a LoRA that can be served: those change linear "
                        "layers before the output projection only; merge it into its model"
                    )
                module = name.removesuffix(DOWN).removesuffix(UP)
                if not {module + DOWN, module + UP} <= names:
                    raise UnsupportedModel(f"`{name}` in {file} lacks its other half")
                if name.endswith(DOWN):
                    down, up = (stored.get_tensor(module + half).float() for half in (DOWN, UP))
                    own = module.removeprefix(PREFIX)
                    found[own] = _low_rank(own, down, up, config, file)
    except SafetensorError as error:
        raise UnsupportedModel(f"cannot read {file}: {error}") from None
    if not found:
        raise UnsupportedModel(f"{file} holds no weights")
    return found


def _low_rank(
    module: str, down: torch.Tensor, up: torch.Tensor, config: Mapping[str, Any], file: Path
) -> LowRank:
    if down.dim() != 2 or up.dim() != 2 or not 0 < len(down) == up.shape[1]:
        raise UnsupportedModel(
            f"the halves of `{module}` in {file} do not fit: {tuple(down.shape)} and {tuple(up.shape)}"
        )
    if not (bool(down.isfinite().all()) and bool(up.isfinite().all())):
        raise UnsupportedModel(f"the weights of `{module}` in {file} are NaN or infinite")
    return LowRank(down, up * _scale(module, len(down), config))


def _scale(module: str, rank: int, config: Mapping[str, Any]) -> float:
    """What the product is multiplied by: alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv 2312.03732)."""
    alpha = float(config.get("lora_alpha", 8))  # PEFT's default
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):  # as PEFT matches them
            alpha = float(value)
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
