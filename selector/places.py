"""Free places on the drafters while one slot is assigned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from selector.protocol import DrafterView, PoolView, RequestView


class Places:
    """What is left of every drafter's capacity; who is asked about holds no place until it takes one."""

    def __init__(self, requests: Sequence[RequestView], pool: PoolView) -> None:
        self._drafters = pool.drafters
        self.free = {name: drafter.capacity - drafter.load for name, drafter in pool.drafters.items()}
        for request in requests:
            if request.current in self.free:
                self.free[request.current] += 1

    def usable(self, request: RequestView) -> list[DrafterView]:
        """Drafters the request may use that have a free place, in order of their names."""
        drafters, free = self._drafters, self.free
        return [drafters[name] for name in sorted(request.allowed) if name in drafters and free[name] > 0]

    def has_room(self, request: RequestView, name: str) -> bool:
        """Whether the request may take a place on this drafter."""
        return self.free.get(name, 0) > 0 and name in request.allowed

    def take(self, name: str) -> str:
        """Take a place; an empty name is none. Returns the name."""
        if name:
            self.free[name] -= 1
        return name

    def leave(self, name: str) -> None:
        """Give a place back; an empty name is none."""
        if name:
            self.free[name] += 1

    def of_kind(self, request: RequestView, kind: str) -> str:
        """The instance of a kind that suits best: the request's own, else the emptiest; or none."""
        if self.has_room(request, request.current) and self._drafters[request.current].kind == kind:
            return request.current
        return emptiest((drafter for drafter in self.usable(request) if drafter.kind == kind), self)


def emptiest(drafters: Iterable[DrafterView], places: Places) -> str:
    """Of these the one with the most free places, by name of several; empty if there is none."""
    names = [drafter.name for drafter in drafters]
    return min(names, key=lambda name: (-places.free[name], name), default="")


def kinds_of(request: RequestView, pool: PoolView) -> list[str]:
    """Kinds with an instance the request may use, in order of their names."""
    drafters = pool.drafters
    return sorted({drafters[name].kind for name in request.allowed if name in drafters})
