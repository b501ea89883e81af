"""A selector that moves every request every few steps, and says where to beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from selector.places import Places
from selector.protocol import Outcome, PoolView, RequestView


class Rotate:
    """Each request goes from drafter to drafter in the order of their names, after `every` steps on each."""

    learns_from_steps = learns_from_scores = True

    def __init__(self, every: int = 3) -> None:
        self.every = every

    def begin(self, request_id: str, prompt: Sequence[int], labels: Sequence[str] = ()) -> None:
        pass

    def assign(self, requests: Sequence[RequestView], pool: PoolView) -> dict[str, str]:
        places = Places(requests, pool)
        chosen = {}
        for request in requests:
            name = self._at(request, request.num_steps // self.every)
            chosen[request.request_id] = places.take(name if places.has_room(request, name) else "")
        return chosen

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        assert all(outcome.num_tokens > 0 and outcome.seconds > 0.0 for outcome in outcomes)

    def score(self, request_id: str, kind: str, scored: int, agreed: int) -> None:
        assert agreed <= scored

    def destination(self, request: RequestView, pool: PoolView) -> str:
        return self._at(request, request.num_steps // self.every + 1)

    def forget(self, request_id: str) -> None:
        pass

    def prices(self) -> Mapping[str, float]:
        return {}

    @staticmethod
    def _at(request: RequestView, turn: int) -> str:
        names = sorted(request.allowed)
        return names[turn % len(names)] if names else ""
