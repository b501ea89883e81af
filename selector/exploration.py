"""Whom to score on the tokens of which request: optimism in the face of uncertainty (UCB1, LinUCB).

Any drafter can be judged on what the target has committed without a target call, but it must read it first.
On a running request that pays if the request might move; on one that ended, if later ones like it might.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, log2, sqrt

from selector.acceptance import AcceptanceEstimates
from selector.outlook import Outlook
from selector.places import Places, emptiest, kinds_of
from selector.protocol import PoolView, RequestView

# Other drafters may be scored on a running request once it has this many output tokens, every so many steps,
# while it may still get that many more.
EXPLORE_TOKENS = 8
EXPLORE_STEPS = 4
# The tokens between two readings of a request by one drafter double, so that reading stays cheap. Whatever is
# believed of it, it reads again when some drafter was found to have changed, and after this many tokens, for
# it may have changed itself.
STALE_TOKENS = 16384
# Upper bounds lie so many standard deviations above the estimate: on a running request, where only a switch
# would pay, and on a finished one, from which all later ones like it may profit. In a long request there is
# more to gain, so there the bound rises with the root of the logarithm, as in UCB1.
RUNNING_OPTIMISM = 1.0
FINISHED_OPTIMISM = 2.0
# Of the finished requests at first each may be read by another drafter; after every so many readings a larger
# interval is left between them, until it is this many requests.
EXPLORE_STAGE = 24
EXPLORE_INTERVAL = 8
# A rival must promise this much more than the drafter that serves the request, while as much is expected to
# come as of a short request; less the longer it lasts, for reading is paid once.
RIVAL_MARGIN = 0.08
SHORT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class _Reading:
    """When a kind last read a request, in its output tokens; shifts known then; tokens until it may again."""

    at: int
    num_shifts: int
    wait: int


@dataclass(slots=True)
class Exploration:
    """Chooses drafters to be scored, and remembers who was."""

    estimates: AcceptanceEstimates
    _read: dict[str, dict[str, _Reading]] = field(default_factory=dict)
    _num_read: int = 0
    _since_read: int = 0

    def restart(self) -> None:
        """A kind joined of which nothing is known: ended requests are read as often as in the beginning."""
        self._num_read = 0

    def forget(self, request_id: str) -> None:
        """A request ended."""
        self._read.pop(request_id, None)

    def on_running(self, request: RequestView, kind: str, pool: PoolView, prices: Mapping[str, float]) -> str:
        """Instance to be scored on a running request; empty for none.

        What a drafter promises counts less the price of the place: a request whose drafter others wait for
        may have to move to one that is worse for itself, and one that is too dear need not be known.

        Args:
            request: it.
            kind: of the drafter that serves it; empty if none does.
            pool: the idle drafters.
            prices: of a place on each kind, tokens per second.
        """
        output = request.num_context - request.num_prompt
        if output < EXPLORE_TOKENS or request.num_remaining < EXPLORE_TOKENS:
            return ""
        if request.num_steps % EXPLORE_STEPS and output != EXPLORE_TOKENS:
            return ""
        read = self._read.setdefault(request.request_id, {})
        num_shifts = self.estimates.num_shifts
        outlook = Outlook(request, pool)
        to_beat = outlook.none
        if kind:
            known = int(self.estimates.evidence(request.request_id, kind))
            read[kind] = _Reading(output, num_shifts, min(max(EXPLORE_TOKENS, known), STALE_TOKENS))
            to_beat = outlook.goodput(kind, self.estimates.rate(request.request_id, kind))
        to_beat *= 1.0 + RIVAL_MARGIN * min(1.0, SHORT_TOKENS / outlook.num_expected)
        to_beat -= prices.get(kind, 0.0)
        optimism = RUNNING_OPTIMISM * sqrt(1.0 + max(0.0, log2(outlook.num_expected / SHORT_TOKENS)))
        best, best_value, wait = "", -inf, 0
        for rival in kinds_of(request, pool):
            if rival == kind:
                continue
            last = read.get(rival, _Reading(0, num_shifts, EXPLORE_TOKENS))
            has_shifts = last.num_shifts < num_shifts
            unread = output - last.at
            if unread < (EXPLORE_TOKENS if has_shifts else last.wait):
                continue
            rate, spread = self.estimates.posterior(request.request_id, rival)
            value = outlook.goodput(rival, min(1.0, rate + optimism * spread))
            value -= prices.get(rival, 0.0)
            is_stale = has_shifts or (rival in read and unread >= STALE_TOKENS)
            if (value > to_beat or is_stale) and value > best_value:
                best, best_value = rival, value
                wait = EXPLORE_TOKENS if has_shifts else min(2 * last.wait, STALE_TOKENS)
        if best:
            read[best] = _Reading(output, num_shifts, wait)
        return _instance(request, best, pool)

    def on_ended(self, request: RequestView, pool: PoolView, kinds: Mapping[str, str]) -> str:
        """Instance to be scored on a request that ended; empty for none.

        Asked is whoever could be a better choice for requests like it than the one that seems best.

        Args:
            request: it, before it is forgotten.
            pool: the idle drafters.
            kinds: of all drafters by name, busy ones included.
        """
        if not request.num_steps:
            return ""
        self._since_read += 1
        if self._since_read < min(EXPLORE_INTERVAL, 1 + self._num_read // EXPLORE_STAGE):
            return ""
        idle = kinds_of(request, pool)
        if not idle:  # and what would have to be beaten need not be worked out
            return ""
        outlook = Outlook(request, pool)
        to_beat, best, best_value = 0.0, "", 0.0
        for kind in sorted({kinds[name] for name in request.allowed if name in kinds}):
            rate, spread = self.estimates.prior(request.request_id, kind)
            to_beat = max(to_beat, outlook.goodput(kind, min(max(rate, 0.0), 1.0)))
            if kind in idle and not self.estimates.evidence(request.request_id, kind):
                value = outlook.goodput(kind, min(max(rate + FINISHED_OPTIMISM * spread, 0.0), 1.0))
                if value > best_value:
                    best, best_value = kind, value
        if not best or best_value <= to_beat:
            return ""
        self._num_read += 1
        self._since_read = 0
        return _instance(request, best, pool)


def _instance(request: RequestView, kind: str, pool: PoolView) -> str:
    places = Places((), pool)
    named = (pool.drafters[name] for name in sorted(request.allowed) if name in pool.drafters)
    return emptiest((drafter for drafter in named if drafter.kind == kind), places)
