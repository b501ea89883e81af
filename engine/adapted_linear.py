"""Linear maps to which the rows of a batch add what their own adapter says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.adapter_files import starts_of
from engine.devices import CPU, to_device
from engine.linear import Linear
from engine.quantized_linear import QuantizedLinear
from engine.runner import Segment

Int64 = NDArray[np.int64]


class AdapterRows:
    """Which adapter each row of the forward under way has, for all adapted maps of a runner.

    Attributes:
        columns: of the low-rank halves of all adapters together.
    """

    def __init__(self, ranks: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> None:
        """For adapters numbered from 1, of these ranks."""
        self.columns = sum(ranks)
        self._adapters: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None
        self._groups: list[tuple[int, torch.Tensor | None]] | None = None
        table = torch.zeros(len(ranks) + 1, self.columns, dtype=dtype, device=CPU)
        for number, (start, rank) in enumerate(zip(starts_of(ranks), ranks, strict=True), 1):
            table[number, start : start + rank] = 1
        self._table = table.to(device)

    def begin(self, adapters: torch.Tensor | None) -> None:
        """The rows of the next forward have these adapters, int [rows], 0 for none; None if none has one."""
        self._adapters, self._mask, self._groups = adapters, None, None

    @property
    def mask(self) -> torch.Tensor | None:
        """[rows, columns], 1 where a column is of the row's adapter; None while no row has one."""
        if self._mask is None and self._adapters is not None:
            self._mask = self._table.index_select(0, self._adapters)
        return self._mask

    @property
    def groups(self) -> list[tuple[int, torch.Tensor | None]]:
        """Number of each adapter that rows have, and which these are, int64; None for all.

        Which they are is looked up, for which on a GPU the host would wait.
        """
        if self._groups is None:
            self._groups = [] if self._adapters is None else _groups_of(self._adapters)
        return self._groups

    def select(self, rows: torch.Tensor) -> None:
        """It goes on with these rows alone."""
        if self._adapters is not None:
            self.begin(self._adapters.index_select(0, rows))


class Halves(NamedTuple):
    """What adds to a map: `up` of `down`."""

    down: Linear
    up: Linear


class StackedAdapters:
    """What all adapters add to a map, multiplied at once: every row keeps the columns of its own.

    The operations are the same whoever asks for which adapter, so that they can be captured. A row without
    one adds zeros, which changes nothing.
    """

    def __init__(self, halves: Halves, rows: AdapterRows, *, parts: int) -> None:
        """Of `parts` fused layers, each with `rows.columns` columns of its own."""
        self._halves, self._rows, self._parts = halves, rows, parts

    def add_to(self, product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`product` [rows, outputs] and what is added for `x` [rows, inputs]."""
        mask = self._rows.mask
        if mask is None:
            return product
        low = self._halves.down(x).view(len(x), self._parts, self._rows.columns).mul_(mask.unsqueeze(1))
        return self._halves.up.add_to(product, low.view(len(x), -1))


class GroupedAdapters:
    """What each adapter adds to a map, for the rows that have it and those alone: least to compute.

    Which rows these are the host has to know, so that it is for CPUs.
    """

    def __init__(self, halves: dict[int, Halves], rows: AdapterRows) -> None:
        """By the numbers of the adapters that add something."""
        self._halves, self._rows = halves, rows

    def add_to(self, product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `StackedAdapters`."""
        for number, rows in self._rows.groups:
            halves = self._halves.get(number)
            if halves is None:
                continue
            if rows is None:
                product = halves.up.add_to(product, halves.down(x))
            else:
                product.index_add_(0, rows, halves.up(halves.down(x.index_select(0, rows))))
        return product


class AdaptedLinear:
    """A linear map of a model, plus that of low rank which each row's adapter has.

    Attributes:
        gain: what `x` is to be multiplied by before the call, as of the model's own map.
    """

    def __init__(self, base: Linear | QuantizedLinear, adapters: StackedAdapters | GroupedAdapters) -> None:
        """Add to `base` what `adapters` say."""
        self._base, self._adapters = base, adapters
        self.gain: torch.Tensor | None = base.gain

    @property
    def is_homogeneous(self) -> bool:
        """Whether the product with a multiple of `x` is that multiple of the product."""
        return self._base.is_homogeneous

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, outputs] for `x` [rows, inputs]."""
        return self._adapters.add_to(self._base(x), x)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`residual` [rows, outputs] plus this map of `x` [rows, inputs], maybe in `residual`'s memory."""
        return self._adapters.add_to(self._base.add_to(residual, x), x)


def _groups_of(adapters: torch.Tensor) -> list[tuple[int, torch.Tensor | None]]:
    found = [(n, torch.nonzero(adapters == n)[:, 0]) for n in adapters.unique().tolist() if n]
    return [(number, None if len(rows) == len(adapters) else rows) for number, rows in found]


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
