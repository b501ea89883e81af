"""Adapters laid out for the fused, perhaps shared out, linear maps of Llama-shaped models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.adapted_linear import AdaptedLinear, AdapterRows, starts_of
from engine.adapter_files import Adapter, LowRank
from engine.fp8_linear import Fp8Linear
from engine.linear import Linear
from engine.unsupported_model import UnsupportedModel
from engine.weight_parts import Weight


@dataclass(frozen=True, slots=True)
class Part:
    """One of the model's linear layers within a fused map.

    Attributes:
        module: its name.
        shape: (outputs, inputs) of the whole layer.
        cut: this rank's share of what is added to it, its outputs in the order of the fused map.
    """

    module: str
    shape: tuple[int, ...]
    cut: Callable[[LowRank], LowRank]

    @classmethod
    def of(cls, module: str, weight: Weight, cut: Callable[[LowRank], LowRank]) -> Part:
        """The layer with this weight."""
        return cls(module, tuple(weight.shape), cut)


class LlamaAdapters:
    """Makes adapted maps of those of a model, one after the other.

    Attributes:
        rows: of all of them.
    """

    def __init__(self, adapters: Sequence[Adapter], *, dtype: torch.dtype, device: torch.device) -> None:
        """For adapters numbered from 1."""
        self._adapters = adapters
        self._ranks = [adapter.rank for adapter in adapters]
        self._dtype, self._device = dtype, device
        self._laid_out: set[str] = set()
        self.rows = AdapterRows(self._ranks, dtype=dtype, device=device)

    def adapted(
        self, base: Linear | Fp8Linear, parts: Sequence[Part], scale: torch.Tensor | None = None
    ) -> Linear | Fp8Linear | AdaptedLinear:
        """The map `base` of some layers of the model, with what adapters add; itself where none does.

        Args:
            base: the fused map.
            parts: whose outputs it yields, one after the other.
            scale: [inputs], what `base` multiplies its input by.

        Raises:
            UnsupportedModel: if an adapter is of layers of another shape.
        """
        self._laid_out |= {part.module for part in parts}
        found = [(index, *one) for index, part in enumerate(parts) for one in self._cut(part)]
        if not found:
            return base
        columns = self.rows.columns
        outputs = [len(part.cut(_nothing(part)).up) for part in parts]
        down = torch.zeros(len(parts) * columns, found[0][2].down.shape[1])
        up = torch.zeros(sum(outputs), len(parts) * columns)
        for index, start, low in found:
            first = index * columns + start
            own = slice(first, first + len(low.down))
            down[own] = low.down
            row = sum(outputs[:index])
            up[row : row + outputs[index], own] = low.up
        if scale is not None and base.gain is not None:
            scale = None  # the input has it already
        return AdaptedLinear(
            base,
            Linear(self._placed(down), None, scale),
            Linear(self._placed(up)),
            self.rows,
            parts=len(parts),
        )

    def check_all_used(self) -> None:
        """Refuse adapters of layers that no map was made of.

        Raises:
            UnsupportedModel: naming one.
        """
        for adapter in self._adapters:
            unused = sorted(adapter.modules.keys() - self._laid_out)
            if unused:
                raise UnsupportedModel(
                    f"adapter {adapter.name!r} changes `{unused[0]}`, which is none of the linear layers of "
                    "attention and feed-forward in this model: only those can be served with adapters"
                )

    def _cut(self, part: Part) -> list[tuple[int, LowRank]]:
        """What adapters add to a layer, and the first of their columns."""
        found = []
        for start, adapter in zip(starts_of(self._ranks), self._adapters, strict=True):
            low = adapter.modules.get(part.module)
            if low is None:
                continue
            shape = (len(low.up), low.down.shape[1])
            if shape != part.shape:
                raise UnsupportedModel(
                    f"adapter {adapter.name!r} is another model's: `{part.module}` is {part.shape} here, and "
                    f"{shape} there"
                )
            found.append((start, part.cut(low)))
        return found

    def _placed(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.to(self._device, self._dtype)


def _nothing(part: Part) -> LowRank:
    outputs, inputs = part.shape
    return LowRank(torch.zeros(0, inputs), torch.zeros(outputs, 0))
