"""Selectors of users: what goes wrong in them is logged by their name, and requests stay where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.own_classes import Guard, OwnClassError, make_own
from selector.acceptance import AcceptanceEstimates
from selector.protocol import (
    BeginsAnew,
    Explores,
    MovesOnSchedule,
    Outcome,
    PoolView,
    RequestView,
    Selector,
)

METHODS = ("begin", "assign", "observe", "score", "destination", "forget", "prices")


def own_selector(name: str, estimates: AcceptanceEstimates | None) -> Selector:
    """The user's selector of this import path, checked.

    Raises:
        OwnClassError: if it cannot be made, saying why.
    """
    selector: Selector = make_own(name, "selector", estimates, METHODS)
    guard = Guard(name, "selector", selector, "requests keep the drafters they have")
    make = CheckedScheduledSelector if isinstance(selector, MovesOnSchedule) else CheckedSelector
    return make(selector, guard)


class CheckedSelector:
    """A user's selector, which may raise or answer anything.

    Args:
        selector: the user's.
        guard: says what is done with its errors.

    Attributes:
        learns_from_steps, learns_from_scores: as the selector's.
    """

    def __init__(self, selector: Selector, guard: Guard) -> None:
        self._selector, self._guard = selector, guard
        self.learns_from_steps = bool(getattr(selector, "learns_from_steps", True))
        self.learns_from_scores = bool(getattr(selector, "learns_from_scores", True))
        # Only where it has them: others are not asked.
        if isinstance(selector, Explores):
            self._exploring: Explores = selector
            self.explore = self._explore
        if isinstance(selector, BeginsAnew):
            self._beginning: BeginsAnew = selector
            self.begin_anew = self._begin_anew

    def must_not_fail(self) -> None:
        """From now on its errors are raised, so that nobody takes what follows for a measurement."""
        self._guard.instead = None

    def begin(self, request_id: str, prompt: Sequence[int], labels: Sequence[str] = ()) -> None:
        """As the selector's."""
        with self._guard.during("`begin`"):
            self._selector.begin(request_id, prompt, labels)

    def assign(self, requests: Sequence[RequestView], pool: PoolView) -> dict[str, str]:
        """As the selector's; where it fails everybody stays."""
        with self._guard.during("`assign`"):
            chosen = self._selector.assign(requests, pool)
            if not isinstance(chosen, dict):
                raise OwnClassError(
                    f"`assign` answered {type(chosen).__name__}, and not a dict of drafters by request id"
                )
            for name in chosen.values():
                _check_name("assign", name, pool)
            return chosen
        return {request.request_id: request.current for request in requests}

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """As the selector's."""
        with self._guard.during("`observe`"):
            self._selector.observe(outcomes)

    def score(self, request_id: str, kind: str, scored: int, agreed: int) -> None:
        """As the selector's."""
        with self._guard.during("`score`"):
            self._selector.score(request_id, kind, scored, agreed)

    def destination(self, request: RequestView, pool: PoolView) -> str:
        """As the selector's; none where it fails."""
        with self._guard.during("`destination`"):
            name = self._selector.destination(request, pool)
            _check_name("destination", name, pool)
            return name
        return ""

    def forget(self, request_id: str) -> None:
        """As the selector's."""
        with self._guard.during("`forget`"):
            self._selector.forget(request_id)

    def prices(self) -> Mapping[str, float]:
        """As the selector's; none where it fails."""
        with self._guard.during("`prices`"):
            return {kind: float(price) for kind, price in self._selector.prices().items()}
        return {}

    def _explore(self, request: RequestView, pool: PoolView, *, has_ended: bool) -> str:
        with self._guard.during("`explore`"):
            name = self._exploring.explore(request, pool, has_ended=has_ended)
            _check_name("explore", name, pool)
            return name
        return ""

    def _begin_anew(self, kind: str) -> None:
        with self._guard.during("`begin_anew`"):
            self._beginning.begin_anew(kind)


class CheckedScheduledSelector(CheckedSelector, MovesOnSchedule):
    """A user's selector that moves requests at slots of its own choice."""


def _check_name(method: str, name: object, pool: PoolView) -> None:
    if not isinstance(name, str) or (name and name not in pool.drafters):
        there = ", ".join(sorted(pool.drafters)) or "none"
        raise OwnClassError(f"`{method}` named the drafter {name!r}; there are: {there}")
