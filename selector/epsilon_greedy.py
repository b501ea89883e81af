"""SPIN's second baseline (section VI-B2): now and then everybody tries a random drafter.

The paper has requests use the best drafter "with probability epsilon" and a random one otherwise, with
epsilon at 0.2 "for better exploration". Taken by the letter four slots of five would be random; here epsilon
is, as everywhere else, the share of exploration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from selector.averages import GoodputAverages
from selector.places import Places, kinds_of
from selector.protocol import Outcome, PoolView, RequestView


class EpsilonGreedy:
    """One coin per slot decides for all requests, as in the paper."""

    learns_from_steps = True
    learns_from_scores = False

    def __init__(self, epsilon: float = 0.2, seed: int = 0) -> None:
        """Explore in a share `epsilon` of slots.

        Raises:
            ValueError: unless epsilon is from 0 to 1.
        """
        if not 0.0 <= epsilon <= 1.0:
            raise ValueError(f"epsilon must be from 0 to 1, not {epsilon}")
        self._epsilon = epsilon
        self._random = np.random.default_rng(seed)
        self._averages = GoodputAverages()

    def begin(self, request_id: str, prompt: Sequence[int], labels: Sequence[str] = ()) -> None:
        """Nothing is known of a request before it ran."""

    def assign(self, requests: Sequence[RequestView], pool: PoolView) -> dict[str, str]:
        """See `Selector`. Who finds its drafter full takes the next best, or none if it explores.

        Who does not draft now stays where it is, if it has a drafter: no coin is thrown but for a slot.
        """
        if not requests:
            return {}
        places = Places(requests, pool)
        explores = requests[0].is_drafting and bool(self._random.random() < self._epsilon)
        chosen: dict[str, str] = {}
        for request in requests:
            if not request.is_drafting and places.has_room(request, request.current):
                chosen[request.request_id] = places.take(request.current)
        # In random order, so that it is not always the same request that finds its drafter full.
        for index in self._random.permutation(len(requests)).tolist():
            request = requests[index]
            if request.request_id in chosen:
                continue
            kinds = kinds_of(request, pool)
            if explores and kinds:
                kinds = [kinds[int(self._random.random() * len(kinds))]]
            else:
                kinds.sort(key=lambda kind: -self._averages.mean(request.request_id, kind))
            found = (places.of_kind(request, kind) for kind in kinds)
            chosen[request.request_id] = places.take(next(filter(None, found), ""))
        return chosen

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """See `Selector`; every slot counts."""
        for outcome in outcomes:
            if outcome.kind and outcome.seconds > 0.0:
                self._averages.add(outcome.request_id, outcome.kind, outcome.num_tokens / outcome.seconds)

    def score(self, request_id: str, kind: str, scored: int, agreed: int) -> None:
        """A bandit sees only what it chose."""

    def destination(self, request: RequestView, pool: PoolView) -> str:
        """Not known: the coin is thrown when the slot begins."""
        return ""

    def forget(self, request_id: str) -> None:
        """See `Selector`."""
        self._averages.forget(request_id)

    def begin_anew(self, kind: str) -> None:
        """See `BeginsAnew`."""
        self._averages.begin_anew(kind)

    def prices(self) -> Mapping[str, float]:
        """Not known: there is no matching."""
        return {}
