"""Fair queueing between API keys: whose request is admitted next, when several keys have some waiting.

The Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with
weights: each tenant has a counter of the tokens it was served over its weight, and the lowest is next. What
an answer will come to need not be known, as output is charged when it is there. Within a tenant the batching
rule decides.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from cluster.batching.base import Admission, BatchContext, BatchingRule, OrdersQueue
from cluster.batching.common import arrival_order
from cluster.config import FlotillaConfig
from cluster.requests import Request, State
from cluster.stream_messages import Submit
from cluster.tier_config import TierConfig


def tenant_of(request: Request) -> str:
    """Label of whoever is charged for the request; empty without keys."""
    return request.submit.tenant.label


@dataclass(slots=True)
class FairQueue:
    """Counters of tenants; a tenant is who sends requests with one label.

    Attributes:
        tier_weight: weight of a service tier by its name.
        tier_priorities: of the tiers, by name.
        output_cost: what an output token counts for; a prompt token counts for one.
        is_enabled: whether tenants are told apart.
        counters: tokens charged over weight, by label. Of tenants that have nothing here only those are
            kept whose counter still matters.
    """

    tier_weight: Callable[[str], float] = lambda _tier: 1.0
    output_cost: float = 2.0
    is_enabled: bool = True
    counters: dict[str, float] = field(default_factory=dict)
    tier_priorities: Mapping[str, int] = field(default_factory=dict)
    # Output tokens already charged, of requests that were admitted and have not ended.
    _charged: dict[Request, int] = field(default_factory=dict)
    # Who had requests left waiting after the last call, not all of them held back, and who was admitted last.
    _backlogged: frozenset[str] = frozenset()
    _last: str = ""

    @classmethod
    def of(cls, config: FlotillaConfig) -> FairQueue:
        """As configured."""
        fairness, tiers, other = config.fairness, config.tiers, TierConfig()
        priorities = {name: tier.priority for name, tier in tiers.items()}
        return cls(
            lambda tier: tiers.get(tier, other).weight,
            fairness.output_cost,
            fairness.enabled,
            tier_priorities=priorities,
        )

    def admit(
        self,
        rule: BatchingRule,
        waiting: Sequence[Request],
        running: Collection[Request],
        context: BatchContext,
        held: frozenset[Request] = frozenset(),
    ) -> Admission:
        """Who is admitted now, which is charged; arguments as of `BatchingRule.admit`.

        Who is held back is not admitted, and in nobody's way.
        """
        if not self._tells_apart(waiting):
            return rule.admit(_without(held, waiting), running, context)
        self._settle()
        self.counters = self._lifted(waiting)
        answer = self.proposed(rule, waiting, running, context, held)
        for request in answer.admitted:
            if request not in self._charged:  # else it was preempted: its prompt has been paid for
                self._charged[request] = len(request.output)
                self._charge(request, request.num_tokens)
            self._last = tenant_of(request)
        # Who is held back takes no turns, and would save up credit, for itself and for whoever begins there.
        left = held.union(answer.admitted)
        self._backlogged = frozenset(tenant_of(request) for request in waiting if request not in left)
        self._forget()
        return answer

    def proposed(
        self,
        rule: BatchingRule,
        waiting: Sequence[Request],
        running: Collection[Request],
        context: BatchContext,
        held: frozenset[Request] = frozenset(),
    ) -> Admission:
        """Who would be admitted now; nobody is charged."""
        eligible = _without(held, waiting)
        queues = self._queues(eligible)
        if len(queues) <= 1:
            return rule.admit(eligible, running, context)
        counters, holders = self._lifted(waiting), list(running)
        admitted: list[Request] = []
        preempted: list[Request] = []
        while queues:
            label = min(queues, key=lambda one: self._turn(counters[one], queues[one]))
            answer = _first(rule, queues[label], holders, context)
            # Whoever is next in turn is not passed over, or large requests would starve.
            if not answer.admitted or any(one in admitted for one in answer.preempted):
                break
            (request,) = answer.admitted
            room = context.room(holders)
            for one in answer.preempted:
                room.give_back(one)
            room.take(request)
            holders = [one for one in holders if one not in answer.preempted] + [request]
            slots_more = room.slots - context.room(holders).slots
            context = replace(context, free_slots=context.free_slots + slots_more)
            admitted.append(request)
            preempted += answer.preempted
            if request not in self._charged:
                counters[label] += request.num_tokens / self.weight(request.submit)
            queues[label] = [one for one in queues[label] if one is not request]
            if not queues[label]:
                del queues[label]
        return Admission(admitted, preempted)

    def in_order(
        self, rule: BatchingRule, waiting: Sequence[Request], context: BatchContext
    ) -> list[Request]:
        """The waiting requests as they are expected to be admitted, if each gets all of its `max_tokens`."""
        key: Callable[[Request], tuple[float, ...]] = arrival_order
        if isinstance(rule, OrdersQueue):
            ordering = rule

            def by_rule(request: Request) -> tuple[float, ...]:
                return ordering.order(request, context)

            key = by_rule
        queues = self._queues(waiting)
        if len(queues) <= 1:
            return sorted(waiting, key=key)
        counters = self._lifted(waiting)
        ordered = {label: sorted(queue, key=key) for label, queue in queues.items()}
        heap = [(*self._turn(counters[label], queue), label, 0) for label, queue in ordered.items()]
        heapq.heapify(heap)
        found = []
        while heap:
            counter, had_backlog, _, label, index = heapq.heappop(heap)
            queue = ordered[label]
            request = queue[index]
            found.append(request)
            if index + 1 < len(queue):
                counter += self._cost(request)
                order = queue[index + 1].order
                heapq.heappush(heap, (counter, had_backlog, order, label, index + 1))
        return found

    def charge(self, submit: Submit) -> float:
        """What the tenant's counter will have grown by if the request gets all of its `max_tokens`."""
        num_new = max(0, submit.num_reckoned - len(submit.output))
        cost = len(submit.prompt) + len(submit.output) + self.output_cost * num_new
        return cost / self.weight(submit)

    def turns_before(
        self,
        newcomer: Request,
        ahead: Sequence[Request],
        waiting: Sequence[Request],
        charges: Mapping[str, float],
    ) -> dict[str, int]:
        """How many requests of other tenants, not here yet, would begin before the newcomer's turn.

        Args:
            newcomer: who comes.
            ahead: of those waiting, who is before it.
            waiting: all of them, without it.
            charges: label of each other tenant, with what a request of it is charged.
        """
        counters, own = self._lifted([*waiting, newcomer]), tenant_of(newcomer)
        here = {own, *(tenant_of(request) for request in waiting)}
        floor = min(counters[label] for label in here)
        reached = {
            label: counters[label] if label in here else max(floor, counters.get(label, floor))
            for label in (own, *charges)
        }
        for request in ahead:
            label = tenant_of(request)
            if label in reached:
                reached[label] += self._cost(request)
        found = {}
        for label, charge in charges.items():
            turns = (reached[own] - reached[label]) / charge
            # Of equals, whoever had nobody waiting is first.
            found[label] = max(0, math.ceil(turns) if label in here else math.floor(turns) + 1)
        return found

    def num_waiting(self, label: str, waiting: Sequence[Request]) -> int:
        """How many of the waiting requests are the tenant's, where tenants are told apart; else 0."""
        if not label or not self.is_enabled:
            return 0
        return sum(tenant_of(request) == label for request in waiting)

    def _tells_apart(self, waiting: Sequence[Request]) -> bool:
        return self.is_enabled and (bool(self.counters) or any(map(tenant_of, waiting)))

    def _queues(self, waiting: Sequence[Request]) -> dict[str, list[Request]]:
        queues: dict[str, list[Request]] = {}
        for request in waiting:
            queues.setdefault(tenant_of(request) if self.is_enabled else "", []).append(request)
        return queues

    def weight(self, submit: Submit) -> float:
        """Of its tenant for requests of its tier."""
        return submit.tenant.weight * self.tier_weight(submit.tier)

    def _cost(self, request: Request) -> float:
        """What is still to be charged for it if it gets all of its `max_tokens`."""
        cost = self.output_cost * max(0, request.submit.num_reckoned - len(request.output))
        if request not in self._charged:
            cost += request.num_tokens
        return cost / self.weight(request.submit)

    def _charge(self, request: Request, cost: float) -> None:
        label = tenant_of(request)
        self.counters[label] = self.counters.get(label, 0.0) + cost / self.weight(request.submit)

    def _settle(self) -> None:
        """Charge the output since the last call."""
        for request, num_charged in list(self._charged.items()):
            num_output = len(request.output)
            if num_output > num_charged:
                self._charge(request, self.output_cost * (num_output - num_charged))
                self._charged[request] = num_output
            if request.state is State.FINISHED:
                del self._charged[request]

    def _lifted(self, waiting: Sequence[Request]) -> dict[str, float]:
        """The counters, those of newcomers raised: having been away earns no credit.

        A tenant that had nothing waiting begins no lower than the lowest of those that had; where nobody
        had, than the one admitted last.
        """
        labels = {tenant_of(request) for request in waiting}
        counters = dict(self.counters)
        stayed = [counters[label] for label in self._backlogged & labels if label in counters]
        floor = min(stayed, default=counters.get(self._last, 0.0))
        for label in labels - self._backlogged:
            counters[label] = max(floor, counters.get(label, 0.0))
        for label in labels:
            counters.setdefault(label, floor)
        return counters

    def _turn(self, counter: float, queue: Sequence[Request]) -> tuple[float, bool, int]:
        """The lowest is next; of equals, whoever had nobody waiting before, then by arrival."""
        had_backlog = tenant_of(queue[0]) in self._backlogged
        return (counter, had_backlog, min(request.order for request in queue))

    def _forget(self) -> None:
        """Drop counters that lifting would make no difference to, and count from the lowest."""
        kept = {self._last, *self._backlogged, *(tenant_of(request) for request in self._charged)}
        floor = min((self.counters[label] for label in kept if label in self.counters), default=0.0)
        self.counters = {
            label: counter - floor
            for label, counter in self.counters.items()
            if label in kept or counter > floor
        }


def _without(held: frozenset[Request], waiting: Sequence[Request]) -> Sequence[Request]:
    return [request for request in waiting if request not in held] if held else waiting


def _first(
    rule: BatchingRule, queue: Sequence[Request], running: Collection[Request], context: BatchContext
) -> Admission:
    """The first that the rule admits of one tenant's queue, and who gives way for it alone."""
    answer = rule.admit(queue, running, context)
    if len(answer.admitted) > 1 or (answer.preempted and not answer.admitted):
        return rule.admit(answer.admitted[:1], running, context) if answer.admitted else Admission()
    return answer
