"""Drafters are scored on requests that they do not serve, in idle time (selectors that are `Explores`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cluster.draft_items import opening
from cluster.drafter_state import READ, DrafterState
from cluster.requests import Request
from drafters.messages import DraftCall, DraftItem, DraftResult
from selector.protocol import Explores, Selector

if TYPE_CHECKING:
    from cluster.drafter_pool import DrafterPool

# While there is no idle time, one of so many finished requests is read all the same.
EXPLORE_INTERVAL = 8


class _Exploration(NamedTuple):
    name: str
    call_id: int
    request_id: str
    is_opening: bool


@dataclass(slots=True)
class Explorer:
    """Asks idle drafters to read what the selector wants them scored on: one at a time.

    A drafter must read the whole sequence, which on few cores slows down everybody else.
    """

    pool: DrafterPool
    num_explorations: int = 0
    _exploring: _Exploration | None = None
    _since_read: int = 0
    _explores: tuple[Selector | None, Explores | None] = (None, None)

    def running(self, request: Request, now: float) -> list[tuple[str, DraftCall]]:
        """A prefetch call that lets one idle drafter be scored on what is new to it of a running request."""
        selector = self._selector()
        if self._exploring is not None or selector is None:
            return []
        view = self.pool.request_view(request)
        idle = self._idle(view.allowed)
        holding = [drafter for drafter in idle if request.request_id in drafter.known]
        # Who holds it reads on for a few tokens' work, where another of its kind would read everything.
        held = {drafter.kind for drafter in holding}
        idle = [drafter for drafter in _opening(request, idle) if drafter.kind not in held]
        idle += [drafter for drafter in holding if drafter.num_unread(request)]
        if not idle:
            return []
        name = selector.explore(view, self.pool.pool_view(idle), has_ended=False)
        drafter = next((drafter for drafter in idle if drafter.name == name), None)
        if drafter is None:
            return []
        return self._explore(name, self.pool.item_for(request, drafter), now)

    def final(self, request: Request, now: float, *, is_busy: bool = False) -> list[tuple[str, DraftCall]]:
        """A prefetch call that lets one idle drafter be scored on a request that ends; before `forget`.

        The request has nothing of it, the next ones with such a prompt may. The drafter releases it with its
        next call. `is_busy` says that there is no idle time to do it in.
        """
        selector = self._selector()
        if not request.num_steps or selector is None:
            return []
        self._since_read += 1
        view = self.pool.request_view(request)
        is_idle = self._exploring is None and (not is_busy or self._since_read >= EXPLORE_INTERVAL)
        # Who holds it has been scored on it already.
        idle = _opening(request, self._idle(view.allowed)) if is_idle else []
        # Asked also when nobody is idle: the selector counts the requests that ended.
        name = selector.explore(view, self.pool.pool_view(idle), has_ended=True)
        if not any(drafter.name == name for drafter in idle):
            return []
        self._since_read = 0
        calls = self._explore(name, opening(request, READ), now)
        self.pool.drafters[name].release.append(request.request_id)
        return calls

    def answered(self, name: str, result: DraftResult) -> None:
        """Another may be asked; who cannot follow a request could not have drafted for it."""
        asked = self._exploring
        if asked is None or (asked.name, asked.call_id) != (name, result.call_id):
            return
        self._exploring = None
        # Who has lost a request that it held is asked to read all of it next time, and judged then.
        if asked.is_opening and not any(draft.num_scored for draft in result.drafts):
            self.pool.score(asked.request_id, self.pool.drafters[name].kind, 1, 0)

    def lost(self, name: str) -> None:
        """A drafter is gone, and what it was asked with it."""
        if self._exploring is not None and self._exploring.name == name:
            self._exploring = None

    def _selector(self) -> Explores | None:
        """The pool's, if it explores; to ask it of the protocol takes as long as exploring does."""
        selector = self.pool.selector
        if self._explores[0] is not selector:
            self._explores = (selector, selector if isinstance(selector, Explores) else None)
        return self._explores[1]

    def _idle(self, allowed: Iterable[str]) -> list[DrafterState]:
        """Of these drafters the ones that have nothing to do."""
        return [
            drafter
            for drafter in (self.pool.drafters[name] for name in allowed)
            # Decoding heads can say nothing of a text that the target read without them.
            if not (drafter.outstanding or drafter.capabilities.num_candidates)
        ]

    def _explore(self, name: str, item: DraftItem, now: float) -> list[tuple[str, DraftCall]]:
        call = self.pool.call(name, [item], now)
        self._exploring = _Exploration(name, call.call_id, item.request_id, item.spec is not None)
        self.num_explorations += 1
        return [(name, call)]


def _opening(request: Request, idle: Iterable[DrafterState]) -> list[DrafterState]:
    """Of these drafters the ones that have room and have not read the request."""
    return [
        drafter
        for drafter in idle
        if request.request_id not in drafter.known and len(drafter.known) < drafter.max_requests
    ]
