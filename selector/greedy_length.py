"""SPIN's first baseline (section VI-B2): the shorter the prompt, the smaller the drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from selector.places import Places
from selector.protocol import Outcome, PoolView, RequestView


class GreedyLength:
    """Requests by prompt length over drafters by size, each drafter in proportion to its capacity.

    The paper does not say where the lengths are parted. Here a request whose prompt is longer than a share q
    of the present ones takes the drafter at the share q of all capacity, and stays there while it may: the
    rank of a prompt changes with every request that comes and goes, and moving for that would cost caches.
    """

    learns_from_steps = False
    learns_from_scores = False

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}

    def begin(self, request_id: str, prompt: Sequence[int], labels: Sequence[str] = ()) -> None:
        """See `Selector`."""
        self._lengths.setdefault(request_id, len(prompt))

    def assign(self, requests: Sequence[RequestView], pool: PoolView) -> dict[str, str]:
        """See `Selector`."""
        places = Places(requests, pool)
        chosen: dict[str, str] = {}
        for request in requests:
            if places.has_room(request, request.current):
                chosen[request.request_id] = places.take(request.current)
        waiting = [request for request in requests if request.request_id not in chosen]
        if waiting:
            for request in waiting:
                self._lengths.setdefault(request.request_id, request.num_prompt)
            ranks = self._ranks()
            line = _by_size(pool)
            for request in sorted(waiting, key=lambda request: ranks[request.request_id]):
                place = ranks[request.request_id] / len(ranks) * len(line)
                chosen[request.request_id] = places.take(self._nearest(request, places, line, place))
        return chosen

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""

    def score(self, request_id: str, kind: str, scored: int, agreed: int) -> None:
        """Nothing to learn."""

    def destination(self, request: RequestView, pool: PoolView) -> str:
        """Nobody moves."""
        return ""

    def forget(self, request_id: str) -> None:
        """See `Selector`."""
        self._lengths.pop(request_id, None)

    def prices(self) -> Mapping[str, float]:
        """Not known: nothing is estimated."""
        return {}

    def _ranks(self) -> dict[str, int]:
        """Place of each request among the present ones by prompt length, equal ones by name."""
        ordered = sorted(self._lengths, key=lambda request_id: (self._lengths[request_id], request_id))
        return {request_id: rank for rank, request_id in enumerate(ordered)}

    @staticmethod
    def _nearest(request: RequestView, places: Places, line: Sequence[str], place: float) -> str:
        """The drafter at this place of the line; if it is full or not allowed, the nearest in the line."""
        usable = {drafter.name for drafter in places.usable(request)}
        found = [(abs(at - int(place)), at) for at, name in enumerate(line) if name in usable]
        return line[min(found)[1]] if found else ""


def _by_size(pool: PoolView) -> list[str]:
    """Instances from small to large, each as often as it has places."""
    drafters = sorted(pool.drafters.values(), key=lambda drafter: (drafter.size, drafter.name))
    return [drafter.name for drafter in drafters for _ in range(drafter.capacity)]
