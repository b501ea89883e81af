"""Adapters beside the linear layers of a Transformers model: as `HFRunner` serves them, and in self-tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.adapted_linear import AdapterRows
from engine.adapter_files import Adapter, LowRank, side_by_side
from engine.renaming import renaming_of
from engine.stored_linear import StoredLinear
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
    found: dict[nn.Module, dict[int, LowRank]] = {}
    modules = _Modules(model)
    for number, adapter in enumerate(adapters, 1):
        for name, low in adapter.modules.items():
            found.setdefault(_linear_of(modules, adapter, name), {})[number] = low
    for module, parts in found.items():
        both = side_by_side(parts, ranks)
        down, up = (half.to(model.device, model.dtype) for half in (both.down, both.up))
        module.register_forward_hook(_adding(rows, down, up))
    return rows


@contextmanager
def adapted(model: PreTrainedModel, adapter: Adapter) -> Iterator[None]:
    """While entered, all rows have an adapter: what the model computes in Transformers with it alone."""
    handles = []
    modules = _Modules(model)
    try:
        for name, low in adapter.modules.items():
            module = _linear_of(modules, adapter, name)
            handles.append(module.register_forward_hook(_adding_to_all(low)))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Modules:
    """A model's modules by what adapters call them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @cached_property
    def _rename(self) -> Callable[[str], str]:
        return renaming_of(self.model)

    def find(self, name: str) -> nn.Module | None:
        """The one of that name, or of what Transformers has called it since (Gemma 3's); None if none is."""
        found: nn.Module | None = None
        with suppress(AttributeError):
            found = self.model.get_submodule(name)
        if found is None:
            with suppress(AttributeError):
                found = self.model.get_submodule(self._rename(f"{name}.weight").removesuffix(".weight"))
        return found


def _linear_of(modules: _Modules, adapter: Adapter, name: str) -> nn.Linear | StoredLinear:
    model = modules.model
    module = modules.find(name)
    if module is None:
        raise UnsupportedModel(
            f"adapter {adapter.name!r} is another model's: {type(model).__name__} has no `{name}`"
        )
    if not isinstance(module, nn.Linear | StoredLinear) or module is model.get_output_embeddings():
        raise UnsupportedModel(
            f"adapter {adapter.name!r} changes `{name}`, a {type(module).__name__}: only linear layers "
            "before the output projection can be served with adapters"
        )
    if "experts" in name.split("."):
        raise UnsupportedModel(
            f"adapter {adapter.name!r} changes experts (`{name}`), which see some rows only; merge it into "
            "its model"
        )
    adapter.low_rank_of(name, (module.out_features, module.in_features))  # refuses another shape
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
