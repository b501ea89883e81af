"""Adapters beside the linear layers of a Transformers model: as `HFRunner` serves them, and in self-tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.adapted_linear import AdapterRows, starts_of
from engine.adapter_files import Adapter, LowRank
from engine.devices import CPU
from engine.fp8_module import StoredFp8Linear
from engine.unsupported_model import UnsupportedModel

_Hook = Callable[[nn.Module, tuple[Any, ...], torch.Tensor], torch.Tensor]


def attach_adapters(model: PreTrainedModel, adapters: Sequence[Adapter]) -> AdapterRows:
    """Let the linear layers of a model add what each row's adapter says, for as long as it lives.

    Raises:
        UnsupportedModel: if an adapter is of other layers than the model's linear ones, or of experts, which
            see some rows only.
    """
    ranks = [adapter.rank for adapter in adapters]
    rows = AdapterRows(ranks, dtype=model.dtype, device=model.device)
    found: dict[str, list[tuple[int, LowRank]]] = {}
    for start, adapter in zip(starts_of(ranks), adapters, strict=True):
        for name, low in adapter.modules.items():
            _linear_of(model, adapter, name, low)
            found.setdefault(name, []).append((start, low))
    for name, parts in found.items():
        module = model.get_submodule(name)
        first = parts[0][1]
        down = torch.zeros(rows.columns, first.down.shape[1], device=CPU)
        up = torch.zeros(len(first.up), rows.columns, device=CPU)
        for start, low in parts:
            own = slice(start, start + len(low.down))
            down[own], up[:, own] = low.down, low.up
        module.register_forward_hook(_adding(rows, *(_placed(half, model) for half in (down, up))))
    return rows


@contextmanager
def adapted(model: PreTrainedModel, adapter: Adapter) -> Iterator[None]:
    """While entered, all rows have an adapter: what the model computes in Transformers with it alone."""
    handles = []
    try:
        for name, low in adapter.modules.items():
            module = _linear_of(model, adapter, name, low)
            handles.append(module.register_forward_hook(_adding_to_all(low)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _linear_of(model: PreTrainedModel, adapter: Adapter, name: str, low: LowRank) -> nn.Module:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise UnsupportedModel(
            f"adapter {adapter.name!r} is another model's: {type(model).__name__} has no `{name}`"
        ) from None
    if not isinstance(module, nn.Linear | StoredFp8Linear) or module is model.get_output_embeddings():
        raise UnsupportedModel(
            f"adapter {adapter.name!r} changes `{name}`, a {type(module).__name__}: only linear layers "
            "before the output projection can be served with adapters"
        )
    if "experts" in name.split("."):
        raise UnsupportedModel(
            f"adapter {adapter.name!r} changes experts (`{name}`), which see some rows only; merge it into "
            "its model"
        )
    own, shape = tuple(module.weight.shape), (len(low.up), low.down.shape[1])
    if shape != own:
        raise UnsupportedModel(
            f"adapter {adapter.name!r} is another model's: `{name}` is {own} here, and {shape} there"
        )
    return module


def _adding(rows: AdapterRows, down: torch.Tensor, up: torch.Tensor) -> _Hook:
    def hook(module: nn.Module, arguments: tuple[Any, ...], product: torch.Tensor) -> torch.Tensor:
        if rows.mask is None:
            return product
        x: torch.Tensor = arguments[0]
        return product + ((x @ down.T) * rows.mask) @ up.T

    return hook


def _adding_to_all(low: LowRank) -> _Hook:
    def hook(module: nn.Module, arguments: tuple[Any, ...], product: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = arguments[0]
        down, up = (half.to(x.device, x.dtype) for half in (low.down, low.up))
        return product + (x @ down.T) @ up.T

    return hook


def _placed(half: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    return half.to(model.device, model.dtype)
