"""Recorded decisions made again, by the policy that made them or by another one (docs/decisions-log.md)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import ValidationError

from cluster.config import PolicyConfig
from cluster.decision_log import STALE_CALLS, TABLE_VERSIONS
from cluster.decisions import (
    CalibrationTable,
    CallContext,
    DecisionsError,
    Entry,
    Header,
    PolicyCall,
    RequestDecision,
    StepRecord,
)
from cluster.policies.base import Policy, StepContext, StopsDrafting
from cluster.policies.registry import make_policy
from cluster.recorded_context import restored_context
from drafters.messages import DraftPlan
from engine.stop_rules import StopRule
from engine.tree import TokenTree

# A step is written when it is over, so calls may be this far from their order; beyond, one is missing.
REORDER_CALLS = 4 * STALE_CALLS
# Two machines may round the last digit of a logarithm differently.
RELATIVE_TOLERANCE = 1e-9

# Number of the call, of the call within its kind, of arrival (so that all differ); kind; step.
Calls = list[tuple[int, int, int, str, "ReplayedStep"]]


@dataclass(frozen=True, slots=True)
class Difference:
    """One decision that came out differently.

    Attributes:
        what: "plan", "stop rule" or "selection".
        subject: whose: a request's id, or a drafter's name.
        recorded, replayed: in words.
    """

    what: str
    subject: str
    recorded: str
    replayed: str


@dataclass(slots=True, eq=False)
class ReplayedStep:
    """A recorded step, and what was decided this time.

    Attributes:
        record: as it was.
        plans: shapes, by index of the request.
        nodes: nodes selected, the root included, by index of the request.
        differences: between the two.
        context: of selection, else of the plan; what the step cost is predicted from it.
    """

    record: StepRecord
    plans: dict[int, DraftPlan] = field(default_factory=dict)
    nodes: dict[int, list[int]] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    context: StepContext | None = None
    num_left: int = 0

    @property
    def is_same(self) -> bool:
        """Whether every decision is."""
        return not self.differences


@dataclass(frozen=True, slots=True)
class Segment:
    """From here on, the record is one scheduler's.

    Attributes:
        header: of the record.
        policy: the configuration replayed.
        starts_midway: whether calls before the first one are not in the record.
    """

    header: Header
    policy: PolicyConfig
    starts_midway: bool


class Replay:
    """Replays a record.

    Args:
        policy: name of another policy to be asked instead, with the recorded configuration else.

    Attributes:
        num_missing: calls of the policy that the record lacks in between.
    """

    def __init__(self, policy: str | None = None) -> None:
        self.num_missing = 0
        self._name = policy
        self._header: Header | None = None
        self._policy: Policy | None = None
        self._tables: dict[tuple[str, int], CalibrationTable] = {}
        self._calls: Calls = []
        self._num_pushed = 0
        self._next_order = 0
        # Of schedulers that others interrupted: the policy as they left it, and their next call.
        self._interrupted: dict[str, tuple[Policy, int]] = {}

    def run(self, entries: Iterable[Entry]) -> Iterator[Segment | ReplayedStep]:
        """A segment for each header, and its steps, each as soon as all its decisions were made.

        Raises:
            DecisionsError: if the record, or the policy it names, is not one of this version.
            ValueError: for an unknown policy.
        """
        for entry in entries:
            match entry:
                case Header():
                    yield from self._finish()
                    yield self._begin(entry)
                case CalibrationTable(drafter=drafter, version=version):
                    self._tables[drafter, version] = entry
                    self._tables.pop((drafter, version - 2 * TABLE_VERSIONS), None)
                case StepRecord():
                    yield from self._take(entry)
        yield from self._finish()

    def _begin(self, header: Header) -> Segment:
        try:
            config = PolicyConfig.model_validate(header.policy)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise DecisionsError(
                f"the policy configuration, written by Flotilla {header.flotilla}, does not suit "
                f"this version: `{where}`: {first['msg']}"
            ) from error
        if self._name is not None:
            config = config.model_copy(update={"name": self._name})
        if self._header is not None and self._policy is not None:
            self._interrupted[self._header.scheduler] = (self._policy, self._next_order)
        policy, next_order = self._interrupted.get(header.scheduler, (make_policy(config), 0))
        self._header, self._policy = header, policy
        self._tables.clear()
        self._next_order = header.first_call
        return Segment(header, config, starts_midway=header.first_call > next_order)

    def _take(self, record: StepRecord) -> Iterator[ReplayedStep]:
        step = ReplayedStep(record, num_left=len(record.orders))
        for number, plan in enumerate(record.plans):
            self._push(plan.order, number, "plan", step)
        for number, rule in enumerate(record.stop_rules):
            self._push(rule.order, number, "stop rule", step)
        if record.select is not None:
            self._push(record.select.order, 0, "selection", step)
        if step.num_left == 0:  # the policy rested: there was nothing to decide
            yield step
        while self._calls and (self._calls[0][0] <= self._next_order or len(self._calls) > REORDER_CALLS):
            yield from self._call()

    def _push(self, order: int, number: int, what: str, step: ReplayedStep) -> None:
        self._num_pushed += 1
        heapq.heappush(self._calls, (order, number, self._num_pushed, what, step))

    def _finish(self) -> Iterator[ReplayedStep]:
        while self._calls:
            yield from self._call()

    def _call(self) -> Iterator[ReplayedStep]:
        order, number, _, what, step = heapq.heappop(self._calls)
        self.num_missing += max(0, order - self._next_order)
        self._next_order = max(self._next_order, order + 1)
        match what:
            case "plan":
                self._plan(step, step.record.plans[number])
            case "stop rule":
                self._rule(step, number)
            case _:
                self._select(step)
        step.num_left -= 1
        if step.num_left == 0:
            yield step

    def _plan(self, step: ReplayedStep, call: PolicyCall) -> None:
        assert self._policy is not None
        decisions = _batch(step.record, call.requests)
        step.context = self._context(call.context)
        plans = self._policy.plan([one.request for one in decisions], step.context)
        for place, decision, plan in zip(call.requests, decisions, plans, strict=True):
            step.plans[place] = plan
            # Two plans that draft nothing are the same, whatever they say of when to stop.
            is_same = decision.plan is not None and (
                decision.plan.depth == plan.depth == 0 or alike(decision.plan, plan)
            )
            if not is_same:
                step.differences.append(
                    Difference("plan", decision.request.request_id, in_words(decision.plan), in_words(plan))
                )

    def _rule(self, step: ReplayedStep, number: int) -> None:
        call = step.record.stop_rules[number]
        rule: StopRule | None = None
        policy: object = self._policy
        if isinstance(policy, StopsDrafting):
            batch = [one.request for one in _batch(step.record, call.requests)]
            rule = policy.stop_rule(call.drafter, call.num_drafting, batch, self._context(call.context))
        if not alike(call.rule, rule):
            step.differences.append(
                Difference("stop rule", call.drafter, in_words(call.rule), in_words(rule))
            )

    def _select(self, step: ReplayedStep) -> None:
        call = step.record.select
        assert call is not None
        assert self._policy is not None
        decisions = _batch(step.record, call.requests)
        trees = _trees(step.record, decisions)
        step.context = self._context(call.context)
        selected = self._policy.select([one.request for one in decisions], trees, step.context)
        for place, decision, nodes in zip(call.requests, decisions, selected, strict=True):
            step.nodes[place] = nodes.tolist()
            if decision.nodes != step.nodes[place]:
                step.differences.append(
                    Difference(
                        "selection",
                        decision.request.request_id,
                        _nodes_in_words(decision.nodes),
                        _nodes_in_words(step.nodes[place]),
                    )
                )

    def _context(self, recorded: CallContext) -> StepContext:
        assert self._header is not None
        return restored_context(recorded, self._header.profile, self._tables)


def _batch(record: StepRecord, places: Sequence[int]) -> list[RequestDecision]:
    if any(not 0 <= place < len(record.requests) for place in places):
        raise DecisionsError(f"step {record.step} names requests that it does not hold")
    return [record.requests[place] for place in places]


def _trees(record: StepRecord, decisions: Sequence[RequestDecision]) -> list[TokenTree]:
    trees = []
    for decision in decisions:
        try:
            if decision.tree is None:
                raise ValueError("it is missing")
            decision.tree.validate()
        except ValueError as error:
            raise DecisionsError(
                f"step {record.step}: the candidate tree of request {decision.request.request_id}: {error}"
            ) from error
        trees.append(decision.tree)
    return trees


def alike(one: Any, other: Any) -> bool:
    """Whether two decisions are the same, but for the rounding of logarithms."""
    if isinstance(one, msgspec.Struct) and type(one) is type(other):
        return alike(msgspec.structs.asdict(one), msgspec.structs.asdict(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float):
        return one == other or math.isclose(one, other, rel_tol=RELATIVE_TOLERANCE)
    return bool(one == other)


def in_words(decision: msgspec.Struct | None) -> str:
    """The fields that are not their defaults, or `none`."""
    if decision is None:
        return "none"
    defaults = {one.name: one.default for one in msgspec.structs.fields(decision)}
    values = msgspec.structs.asdict(decision)
    return ", ".join(
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
        if value != defaults[name]
    )


def _nodes_in_words(nodes: Sequence[int]) -> str:
    return "nodes " + " ".join(map(str, nodes[1:])) if len(nodes) > 1 else "no nodes"
