"""The same drafter from beginning to end: what a homogeneous pool does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from selector.places import Places, emptiest
from selector.protocol import Outcome, PoolView, RequestView


class Fixed:
    """Each request takes the emptiest of the named drafters and stays while it may."""

    learns_from_steps = False
    learns_from_scores = False

    def __init__(self, drafters: Sequence[str] = ()) -> None:
        """Use only `drafters`, instances or kinds by name; all drafters if it is empty."""
        self._names = frozenset(drafters)

    def begin(self, request_id: str, prompt: Sequence[int], labels: Sequence[str] = ()) -> None:
        """Nothing to learn."""

    def assign(self, requests: Sequence[RequestView], pool: PoolView) -> dict[str, str]:
        """See `Selector`."""
        places = Places(requests, pool)
        chosen: dict[str, str] = {}
        # Those who stay first: a newcomer must not take the place of one who is served.
        for request in requests:
            if self._is_named(request.current, pool) and places.has_room(request, request.current):
                chosen[request.request_id] = places.take(request.current)
        for request in requests:
            if request.request_id not in chosen:
                named = (drafter for drafter in places.usable(request) if self._is_named(drafter.name, pool))
                chosen[request.request_id] = places.take(emptiest(named, places))
        return chosen

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""

    def score(self, request_id: str, kind: str, scored: int, agreed: int) -> None:
        """Nothing to learn."""

    def destination(self, request: RequestView, pool: PoolView) -> str:
        """Nobody moves."""
        return ""

    def forget(self, request_id: str) -> None:
        """Nothing was kept."""

    def prices(self) -> Mapping[str, float]:
        """Not known: nothing is estimated."""
        return {}

    def _is_named(self, name: str, pool: PoolView) -> bool:
        if name not in pool.drafters:
            return False
        return not self._names or name in self._names or pool.drafters[name].kind in self._names
