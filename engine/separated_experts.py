"""Experts of Transformers models taken apart again, each with layers of its own, as checkpoints have them.

Transformers keeps a layer's experts in one tensor of floats. Quantized ones are read into linear layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from engine.stored_linear import plain_linear

# What checkpoints call an expert's gate, what it gates, and its output.
_NAMINGS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


class SeparatedExperts(nn.ModuleList):
    """A layer's experts, called as Transformers calls its own.

    Attributes:
        num_experts: how many.
    """

    def __init__(self, fused: Any, names: tuple[str, str, str]) -> None:
        """In place of `fused`, for which `can_be_separated` is true, and whose weights are shared."""
        matrices = zip(fused.gate_up_proj.detach(), fused.down_proj.detach(), strict=True)
        super().__init__(_Expert(names, (*both.chunk(2), down)) for both, down in matrices)
        self.num_experts = len(self)
        self._names, self._activation = names, fused.act_fn

    def layers_of(self, number: int) -> tuple[nn.Module, nn.Module, nn.Module]:
        """Of an expert, which makes its gate, what it gates, and its output."""
        gate, up, down = (getattr(self[number], name) for name in self._names)
        return gate, up, down

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[rows, hidden] of `hidden_states` [rows, hidden]; experts and weights [rows, experts per row]."""
        total = torch.zeros_like(hidden_states)
        for number in top_k_index.unique().tolist():
            row, place = torch.where(top_k_index == number)
            gate, up, down = self.layers_of(number)
            given = hidden_states[row]
            made = down(self._activation(gate(given)) * up(given)) * top_k_weights[row, place, None]
            total.index_add_(0, row, made.to(total.dtype))
        return total


class _Expert(nn.Module):
    def __init__(self, names: tuple[str, str, str], matrices: Sequence[torch.Tensor]) -> None:
        super().__init__()
        for name, matrix in zip(names, matrices, strict=True):
            self.add_module(name, plain_linear(matrix, None))


def can_be_separated(module: nn.Module) -> bool:
    """Whether a module holds experts that compute what Mixtral's do: by its weights, and its code's text."""
    own = {name: weight.dim() for name, weight in module.named_parameters(recurse=False)}
    if own != {"gate_up_proj": 3, "down_proj": 3} or not hasattr(module, "act_fn"):
        return False
    try:
        return _source(type(module)) == _source(MixtralExperts)
    except (OSError, TypeError):  # there is no text
        return False


def are_separate(modules: Iterable[str]) -> bool:
    """Whether some of these modules, by their names in a checkpoint, are layers of experts of their own."""
    return any(_is_of_expert(module.split(".")) for module in modules)


def separate(model: nn.Module, modules: Collection[str] = ()) -> None:
    """Put `SeparatedExperts` in the place of all experts in a model that allow it.

    Args:
        model: the model.
        modules: names of linear layers in its checkpoint, which tell how those of experts are called.
    """
    for _ in separated(model, modules):
        pass


def separated(model: nn.Module, modules: Collection[str] = ()) -> Iterator[SeparatedExperts]:
    """The same one by one: what of each is replaced before the next is asked for, is gone."""
    called = {module.rpartition(".")[2] for module in modules if _is_of_expert(module.split("."))}
    names = next((naming for naming in _NAMINGS if called <= set(naming)), _NAMINGS[0])
    for name in [name for name, module in model.named_modules() if can_be_separated(module)]:
        parent, _, own = name.rpartition(".")
        experts = SeparatedExperts(model.get_submodule(name), names)
        setattr(model.get_submodule(parent), own, experts)
        yield experts


def _is_of_expert(path: Sequence[str]) -> bool:
    return len(path) > 2 and path[-3] == "experts" and path[-2].isdigit()


def _source(kind: type[nn.Module]) -> str:
    """The text of a module's forward, without what it is decorated with."""
    return inspect.getsource(inspect.unwrap(kind.forward))
