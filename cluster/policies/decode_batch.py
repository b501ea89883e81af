"""Requests that draft next, and what policies ask of all of them: each worked out once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.policies.base import DecodeRequest

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

# An acceptance rate of 1 would make any chain sure.
MOST_CERTAIN_RATE = 0.98


class DecodeBatch(list[DecodeRequest]):
    """Requests in order; what is worked out of them is kept, so the list must not change after that.

    Attributes:
        num_context: context tokens of all.
        load: by drafter, requests it drafts for and their context tokens.
        num_drafting: requests that may draft at least one token.
        has_objectives: whether any has one.
        limits: int64 [requests], `max_draft`.
        rates: float64 [requests], acceptance rates, below 1.
        drafted_rates: float64 [requests], the same; 0 for those that nobody drafts for.
    """

    __slots__ = ("_drafted_rates", "_has_objectives", "_limits", "_load", "_num_context", "_rates")

    def __init__(self, requests: Iterable[DecodeRequest] = ()) -> None:
        super().__init__(requests)
        self._load: dict[str, tuple[int, int]] | None = None
        self._num_context: int | None = None
        self._has_objectives: bool | None = None
        self._limits: Int64 | None = None
        self._rates: Float64 | None = None
        self._drafted_rates: Float64 | None = None

    @classmethod
    def of(cls, batch: Sequence[DecodeRequest]) -> DecodeBatch:
        """These requests; themselves if they are a batch already."""
        return batch if isinstance(batch, DecodeBatch) else cls(batch)

    @property
    def num_context(self) -> int:
        """See above."""
        if self._num_context is None:
            self._num_context = sum([request.num_context for request in self])
        return self._num_context

    @property
    def load(self) -> dict[str, tuple[int, int]]:
        """See above."""
        if self._load is None:
            load: dict[str, tuple[int, int]] = {}
            for request in self:
                name = request.drafter
                if name:
                    count, tokens = load.get(name, (0, 0))
                    load[name] = (count + 1, tokens + request.num_context)
            self._load = load
        return self._load

    @property
    def num_drafting(self) -> int:
        """See above."""
        return int(np.count_nonzero(self.limits > 0))

    @property
    def has_objectives(self) -> bool:
        """See above."""
        if self._has_objectives is None:
            self._has_objectives = any(request.tpot_s is not None for request in self)
        return self._has_objectives

    @property
    def limits(self) -> Int64:
        """See above."""
        if self._limits is None:
            self._limits = np.array([request.max_draft for request in self], dtype=np.int64)
        return self._limits

    @property
    def rates(self) -> Float64:
        """See above."""
        if self._rates is None:
            rates = np.array([request.rate for request in self], dtype=np.float64)
            self._rates = np.minimum(rates, MOST_CERTAIN_RATE)
        return self._rates

    @property
    def drafted_rates(self) -> Float64:
        """See above."""
        if self._drafted_rates is None:
            has_drafter = np.array([request.drafter != "" for request in self], dtype=np.bool_)
            self._drafted_rates = np.where(has_drafter, self.rates, 0.0)
        return self._drafted_rates
