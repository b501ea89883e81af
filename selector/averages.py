"""Observed goodput of requests on drafter kinds: the estimates of a bandit without a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Sum:
    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    @property
    def mean(self) -> float:
        return self.total / self.count


class GoodputAverages:
    """Means of goodput (tokens per second) by request and kind, every observation with the same weight."""

    def __init__(self) -> None:
        self._pairs: dict[str, dict[str, _Sum]] = {}
        self._kinds: dict[str, _Sum] = {}

    def add(self, request_id: str, kind: str, goodput: float) -> None:
        """One slot of a request on a kind."""
        pairs = self._pairs.setdefault(request_id, {})
        pairs.setdefault(kind, _Sum()).add(goodput)
        self._kinds.setdefault(kind, _Sum()).add(goodput)

    def count(self, request_id: str, kind: str) -> int:
        """Slots of the request on the kind."""
        found = self._pairs.get(request_id, {}).get(kind)
        return 0 if found is None else found.count

    def mean(self, request_id: str, kind: str) -> float:
        """The request's mean on the kind; that of all requests if it was never there, and 0 if none was."""
        found = self._pairs.get(request_id, {}).get(kind) or self._kinds.get(kind)
        return 0.0 if found is None else found.mean

    def begin_anew(self, kind: str) -> None:
        """The kind has other weights: nothing is known of it."""
        self._kinds.pop(kind, None)
        for pairs in self._pairs.values():
            pairs.pop(kind, None)

    def forget(self, request_id: str) -> None:
        """A request ended; the kinds keep what it brought."""
        self._pairs.pop(request_id, None)
