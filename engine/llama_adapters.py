"""Adapters laid out for the fused, perhaps shared out, linear maps of Llama-shaped models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.adapted_linear import AdaptedLinear, AdapterRows, GroupedAdapters, Halves, StackedAdapters
from engine.adapter_files import Adapter, LowRank, side_by_side
from engine.devices import CPU
from engine.linear import Linear
from engine.quantized_linear import QuantizedLinear
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
        self, base: Linear | QuantizedLinear, parts: Sequence[Part], scale: torch.Tensor | None = None
    ) -> Linear | QuantizedLinear | AdaptedLinear:
        """The map `base` of some layers of the model, with what adapters add; itself where none does.

        Args:
            base: the fused map.
            parts: whose outputs it yields, one after the other.
            scale: [inputs], what `base` multiplies its input by.

        Raises:
            UnsupportedModel: if an adapter is of layers of another shape.
        """
        self._laid_out |= {part.module for part in parts}
        added = [self._cut(part) for part in parts]
        if not any(added):
            return base
        outputs = [len(part.cut(_empty(*part.shape)).up) for part in parts]
        scale = None if base.gain is not None else scale  # else the input has it already
        if self._device.type == "cpu":
            numbers = sorted({number for one in added for number in one})
            halves = {
                number: self._halves([one.get(number) for one in added], outputs, scale) for number in numbers
            }
            return AdaptedLinear(base, GroupedAdapters(halves, self.rows))
        columns = [side_by_side(one, self._ranks) if one else None for one in added]
        stacked = StackedAdapters(self._halves(columns, outputs, scale), self.rows, parts=len(parts))
        return AdaptedLinear(base, stacked)

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
                    "attention and feed-forward in this model: only those can be served with adapters, and "
                    "none of experts (`runner: hf` serves some that `lean` does not)"
                )

    def _cut(self, part: Part) -> dict[int, LowRank]:
        """What adapters add to a layer, by their numbers."""
        found = {}
        for number, adapter in enumerate(self._adapters, 1):
            low = adapter.low_rank_of(part.module, part.shape)
            if low is not None:
                found[number] = part.cut(low)
        return found

    def _halves(
        self, parts: Sequence[LowRank | None], outputs: Sequence[int], scale: torch.Tensor | None
    ) -> Halves:
        """Both halves for a map of fused layers: of each part its own columns go to its own outputs."""
        inputs = next(low.down.shape[1] for low in parts if low is not None)
        given = [
            _empty(size, inputs) if low is None else low for low, size in zip(parts, outputs, strict=True)
        ]
        down = torch.cat([low.down.cpu() for low in given])
        up = torch.block_diag(*(low.up.cpu() for low in given))
        return Halves(
            Linear(down.to(self._device, self._dtype), None, scale), Linear(up.to(self._device, self._dtype))
        )


def _empty(outputs: int, inputs: int) -> LowRank:
    return LowRank(torch.zeros(0, inputs, device=CPU), torch.zeros(outputs, 0, device=CPU))
