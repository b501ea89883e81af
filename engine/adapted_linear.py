"""Linear maps to which the rows of a batch add what their own adapter says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.devices import to_device
from engine.fp8_linear import Fp8Linear
from engine.linear import Linear
from engine.runner import Segment

Int64 = NDArray[np.int64]


class AdapterRows:
    """Which adapter each row of the forward under way has, for all adapted maps of a runner.

    The low-rank halves of all adapters lie beside each other, so that a batch is multiplied with all at once
    and every row keeps the columns of its own: the operations are the same whoever asks for which adapter,
    and can be captured. A row without one adds zeros, which changes nothing.

    Attributes:
        columns: of all adapters together.
        mask: [rows, columns], 1 where a column is of the row's adapter; None while no row has one.
    """

    def __init__(self, ranks: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> None:
        """For adapters numbered from 1, of these ranks."""
        self.columns = sum(ranks)
        self.mask: torch.Tensor | None = None
        table = torch.zeros(len(ranks) + 1, self.columns, dtype=dtype)
        for number, (start, rank) in enumerate(zip(starts_of(ranks), ranks, strict=True), 1):
            table[number, start : start + rank] = 1
        self._table = table.to(device)

    def begin(self, adapters: torch.Tensor | None) -> None:
        """The rows of the next forward have these adapters, int [rows], 0 for none; None if none has one."""
        self.mask = None if adapters is None else self._table.index_select(0, adapters)

    def select(self, rows: torch.Tensor) -> None:
        """It goes on with these rows alone."""
        if self.mask is not None:
            self.mask = self.mask.index_select(0, rows)


class AdaptedLinear:
    """A linear map of a model, plus that of low rank which each row's adapter has.

    Attributes:
        gain: what `x` is to be multiplied by before the call, as of the model's own map.
    """

    def __init__(
        self, base: Linear | Fp8Linear, down: Linear, up: Linear, rows: AdapterRows, *, parts: int
    ) -> None:
        """Add to `base` what `up` makes of `down`.

        Args:
            base: the model's own map.
            down: to `parts` times `rows.columns` numbers.
            up: from these to the outputs.
            rows: whose columns a row keeps.
            parts: layers of the model that `base` has fused, each with columns of its own.
        """
        self._base, self._down, self._up = base, down, up
        self._rows = rows
        self._parts = parts
        self.gain: torch.Tensor | None = base.gain

    @property
    def is_homogeneous(self) -> bool:
        """Whether the product with a multiple of `x` is that multiple of the product."""
        return self._base.is_homogeneous

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, outputs] for `x` [rows, inputs]."""
        return self._adapted(self._base(x), x)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`residual` [rows, outputs] plus this map of `x` [rows, inputs], maybe in `residual`'s memory."""
        return self._adapted(self._base.add_to(residual, x), x)

    def _adapted(self, product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        mask = self._rows.mask
        if mask is None:
            return product
        low = self._down(x).view(len(x), self._parts, self._rows.columns).mul_(mask.unsqueeze(1))
        return self._up.add_to(product, low.view(len(x), -1))


def starts_of(ranks: Sequence[int]) -> list[int]:
    """The first column of each adapter."""
    return [sum(ranks[:number]) for number in range(len(ranks))]


def adapters_of(segments: Sequence[Segment]) -> Int64:
    """int64 [rows], the adapter of each row of a batch."""
    return np.repeat(
        np.array([segment.adapter for segment in segments], dtype=np.int64),
        [len(segment.slots) for segment in segments],
    )


def adapters_on(segments: Sequence[Segment], device: torch.device) -> torch.Tensor | None:
    """The same, on a device; None if no row has one."""
    if not any(segment.adapter for segment in segments):
        return None
    return to_device(torch.from_numpy(adapters_of(segments)), device)
