"""Which kinds draft for a batch: drafters that share processors are worth less together than each alone.

SPIN gives every drafter devices of its own, so the goodput of a request on a drafter does not depend on who
else drafts. Where drafters share processors (`selector.sharing`) it does: each layer of each drafter has a
part that does not depend on its size, so a batch spread over four drafters drafts four times as long as on
one. The team is found by forward selection, which adds a kind while the whole step then brings more tokens
per second.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from selector.protocol import StepCosts
from selector.sharing import Sharing

Float64 = NDArray[np.float64]

# A kind joins if the step is better by this with it, and another team must be better by this.
LEAST_GAIN = 0.01
LEAST_CHANGE = 0.05


@runtime_checkable
class BatchCosts(Protocol):
    """`StepCosts` that also know what a step of a whole batch takes."""

    @property
    def sharing(self) -> Sharing:
        """Which kinds compute on the same processors."""
        ...

    def step_s(self, num_requests: int, depth: int, num_context: int) -> float:
        """A verify step of a batch with chains of `depth`, and what a step takes beside forwards."""
        ...

    def draft_s(self, kind: str, num_requests: int, depth: int, num_context: int) -> float:
        """One draft call for so many requests, its messages included."""
        ...


@dataclass(frozen=True, slots=True)
class Team:
    """Kinds that draft, what they promise, and how many requests each would serve.

    Attributes:
        counts: requests by kind.
        goodput: tokens per second of the batch at its best depth.
        depth: that depth; 0 where nobody can draft.
        num_waiting: requests that may use one of the kinds, and have no place there.
    """

    counts: Mapping[str, int]
    goodput: float
    depth: int
    num_waiting: int = 0


class TeamSearch:
    """Teams for one batch.

    Args:
        kinds: names, the columns of `rates`.
        rates: float64 [requests, kinds], acceptance rates; negative where a request may not use a kind.
        reading_s: float64 [requests, kinds], seconds per step that reading the request costs the kind, spread
            over the steps it is expected to serve it; 0 where it has read it.
        places: of each kind, requests that it takes.
        num_context: context tokens of all requests.
        costs: seconds.
        max_depth: deepest draft.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        rates: Float64,
        reading_s: Float64,
        places: Sequence[int],
        num_context: int,
        costs: BatchCosts,
        max_depth: int,
    ) -> None:
        self._kinds, self._rates, self._reading_s = list(kinds), rates, reading_s
        self._places = list(places)
        self._costs, self._max_depth = costs, max_depth
        self._num_requests, self._num_context = len(rates), num_context
        self._step_s = [
            costs.step_s(self._num_requests, depth, num_context) for depth in range(max_depth + 1)
        ]

    def evaluate(self, kinds: Collection[str]) -> Team:
        """The team of these kinds, every request on the one most often right that has a place for it.

        Whether to draft at all is the policy's question: a team drafts one layer at least.
        """
        n = self._num_requests
        plain = Team({}, n / self._step_s[0], 0)
        columns = [column for column, kind in enumerate(self._kinds) if kind in kinds]
        if not columns or not self._max_depth:
            return plain
        of_team = self._rates[:, columns]
        choice = of_team.argmax(axis=1)
        rate = np.maximum.reduce(of_team, axis=1)
        places, num_waiting = [self._places[column] for column in columns], 0
        if (np.bincount(choice[rate >= 0.0], minlength=len(columns)) > places).any():
            num_able = np.count_nonzero(rate >= 0.0)
            choice, rate = _within_places(of_team, places)
            num_waiting = int(num_able - np.count_nonzero(rate >= 0.0))
        served = (rate >= 0.0).nonzero()[0]
        choice = choice[served]
        sizes = np.bincount(choice, minlength=len(columns)).tolist()
        spent_s = np.bincount(
            choice, self._reading_s[:, columns][served, choice], minlength=len(columns)
        ).tolist()
        chosen = [place for place, size in enumerate(sizes) if size]
        counts = {self._kinds[columns[place]]: sizes[place] for place in chosen}
        reading_s = {self._kinds[columns[place]]: spent_s[place] for place in chosen}
        if not counts:
            return plain
        powers = np.clip(rate, 0.0, None)[:, None] ** np.arange(1, self._max_depth + 1)
        tokens = n + np.cumsum(powers.sum(axis=0))
        best = Team(counts, 0.0, 0)
        for depth in range(1, self._max_depth + 1):
            seconds = self._step_s[depth] + self._drafting_s(counts, depth, reading_s)
            goodput = float(tokens[depth - 1]) / seconds
            if goodput <= best.goodput:
                break  # one peak (SpecServe, section 4.3)
            best = Team(counts, goodput, depth, num_waiting)
        return best

    def best(self, current: Collection[str] = ()) -> Team:
        """Forward selection; the kinds of `current` stay unless another team is clearly better.

        A kind whose places are needed joins also where it does not pay: nobody is left without a drafter.
        """
        team, members = Team({}, 0.0, 0), set[str]()
        for _ in self._kinds:
            rest = [kind for kind in self._kinds if kind not in members]
            tried = [(self.evaluate({*members, kind}), kind) for kind in rest]
            tried = [option for option in tried if option[0].depth]
            better = [option for option in tried if option[0].goodput > (1.0 + LEAST_GAIN) * team.goodput]
            larger = [option for option in tried if option[0].num_waiting < team.num_waiting]
            if not better and not larger:
                break
            team, kind = max(better or larger, key=lambda option: (option[0].goodput, option[1]))
            members.add(kind)
        stays = self.evaluate(current)
        may_stay = stays.depth and stays.num_waiting <= team.num_waiting
        return stays if may_stay and team.goodput <= (1.0 + LEAST_CHANGE) * stays.goodput else team

    def _drafting_s(self, counts: Mapping[str, int], depth: int, reading_s: Mapping[str, float]) -> float:
        n = self._num_requests
        calls_s = {
            kind: self._costs.draft_s(kind, count, depth, self._num_context * count // n)
            for kind, count in counts.items()
        }
        return self._costs.sharing.seconds(calls_s, reading_s)


@dataclass(frozen=True, slots=True)
class ShareCosts:
    """`StepCosts` of one request in a batch: its share of what the whole step takes.

    Attributes:
        own: of a request by itself.
        batch: of the batch.
        num_requests: in it.
        team: who drafts.
        num_at_once: how many of its kinds compute at the same time.
    """

    own: StepCosts
    batch: BatchCosts
    num_requests: int
    team: Team
    num_at_once: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_at_once", self.batch.sharing.num_at_once(self.team.counts))

    def verify_s(self, num_context: int) -> float:
        """See `StepCosts`."""
        n = self.num_requests
        return self.batch.step_s(n, 0, n * num_context) / n

    def token_s(self, num_context: int) -> float:
        """See `StepCosts`."""
        n = self.num_requests
        num_context *= n
        return (self.batch.step_s(n, 2, num_context) - self.batch.step_s(n, 1, num_context)) / n

    def layer_s(self, kind: str, num_context: int) -> float:
        """See `StepCosts`: what a layer more takes for all that the kind serves, by request."""
        count = max(1, self.team.counts.get(kind, 1))
        num_context *= count
        deep, flat = (
            self.batch.draft_s(kind, count, 4, num_context),
            self.batch.draft_s(kind, count, 2, num_context),
        )
        return (deep - flat) / 2 / count / self.num_at_once

    def rebuild_s(self, kind: str, num_tokens: int) -> float:
        """See `StepCosts`."""
        return self.own.rebuild_s(kind, num_tokens)


def _within_places(rates: Float64, places: Sequence[int]) -> tuple[NDArray[np.int64], Float64]:
    """Column and rate of each request where not all have a place at their best: the surest drafts first."""
    choice, rate = np.zeros(len(rates), dtype=np.int64), np.full(len(rates), -1.0)
    left = list(places)
    for pair in np.argsort(-rates, axis=None, kind="stable").tolist():
        request, column = divmod(pair, rates.shape[1])
        if rates[request, column] >= 0.0 > rate[request] and left[column]:
            choice[request], rate[request] = column, rates[request, column]
            left[column] -= 1
    return choice, rate
