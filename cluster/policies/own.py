"""Policies of users: what they answer is checked before the scheduler acts on it, and errors name them."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from operator import index
from typing import cast

import numpy as np

from cluster.config import PolicyConfig
from cluster.policies.base import (
    DecodeRequest,
    Int32,
    LooksAhead,
    Policy,
    Rests,
    StepContext,
    StopsDrafting,
)
from cluster.policies.decode_batch import DecodeBatch
from drafters.messages import DraftPlan
from engine.own_classes import Guard, OwnClassError, make_own
from engine.stop_rules import StopRule
from engine.tree import TokenTree
from engine.tree_batch import TreeBatch

_INSTEAD = "its requests go on without drafts"


def own_policy(config: PolicyConfig, *, goes_on: bool = False) -> Policy:
    """The user's policy that the configuration names by its import path, checked.

    Args:
        config: of the policy.
        goes_on: whether its errors are logged, and nothing is drafted in their place, as is right for those
            who are being served; else they are raised, so that nobody takes what follows for a measurement.

    Raises:
        OwnClassError: if it cannot be made, saying why.
    """
    policy: Policy = make_own(config.name, "policy", config, ("plan", "select"))
    guard = Guard(config.name, "policy", policy, _INSTEAD if goes_on else None)
    if isinstance(policy, StopsDrafting):
        return CheckedStoppingPolicy(policy, policy, guard)
    return CheckedPolicy(policy, guard)


class CheckedPolicy:
    """A user's policy, which may raise or answer anything.

    Shapes are held within what each request may draft; what is no plan, or no tree, is an error. The lists
    that it is shown are copies and drafts cannot be written to: what is verified must be what was drafted.

    Args:
        policy: the user's.
        guard: says what is done with its errors.

    Raises:
        OwnClassError: by every method, if the guard raises them.
    """

    def __init__(self, policy: Policy, guard: Guard) -> None:
        self._policy, self._guard = policy, guard
        # Only where it has it: whoever never rests is asked for every step.
        if isinstance(policy, Rests):
            self._resting: Rests = policy
            self.rests = self._rests
        if isinstance(policy, LooksAhead):
            self._looking: LooksAhead = policy
            self.look_ahead, self.tries_drafts = self._look_ahead, getattr(policy, "tries_drafts", True)
        self.plans_ahead = bool(getattr(policy, "plans_ahead", False))

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        """As the policy's, within the limits of each request; nothing is drafted where it fails."""
        with self._guard.during("`plan`"):
            plans = self._policy.plan(DecodeBatch(batch), context)
            _check_count("plan", plans, len(batch))
            return [_bounded(plan, request) for plan, request in zip(plans, batch, strict=True)]
        return [DraftPlan(depth=0)] * len(batch)

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """As the policy's; no draft is verified where it fails."""
        for tree in trees:
            for array in (tree.token, tree.parent, tree.logp, tree.depth):
                array.flags.writeable = False
        with self._guard.during("`select`"):
            selected = self._policy.select(DecodeBatch(batch), TreeBatch(trees), context)
            _check_count("select", selected, len(batch))
            return _checked_nodes(selected, TreeBatch(trees))
        return [np.zeros(1, dtype=np.int32)] * len(batch)

    def _rests(self, num_requests: int, step: int) -> bool:
        with self._guard.during("`rests`"):
            return bool(self._resting.rests(num_requests, step))
        return False

    def _look_ahead(self, batch: Sequence[DecodeRequest], context: StepContext) -> None:
        with self._guard.during("`look_ahead`"):
            self._looking.look_ahead(DecodeBatch(batch), context)


class CheckedStoppingPolicy(CheckedPolicy):
    """A user's policy that has stop rules, too."""

    def __init__(self, policy: Policy, stopping: StopsDrafting, guard: Guard) -> None:
        super().__init__(policy, guard)
        self._stopping = stopping

    def stop_rule(
        self, drafter: str, num_drafting: int, batch: Sequence[DecodeRequest], context: StepContext
    ) -> StopRule | None:
        """As the policy's; none where it fails."""
        with self._guard.during("`stop_rule`"):
            rule = self._stopping.stop_rule(drafter, num_drafting, DecodeBatch(batch), context)
            if rule is not None and not isinstance(rule, StopRule):
                raise OwnClassError(f"`stop_rule` answered {_short(rule)}, which is no stop rule")
            return rule
        return None


def _check_count(method: str, answer: object, count: int) -> None:
    if not isinstance(answer, Sequence):
        raise OwnClassError(
            f"`{method}` answered {_short(answer)}, and not a list with one entry per request"
        )
    if len(answer) != count:
        raise OwnClassError(f"`{method}` answered {len(answer)} entries for {count} requests")


def _bounded(plan: DraftPlan, request: DecodeRequest) -> DraftPlan:
    """The plan with whole numbers, no deeper or wider than the request may draft."""
    if not isinstance(plan, DraftPlan):
        raise OwnClassError(f"`plan` answered {_short(plan)} for a request, and not a DraftPlan")
    try:
        depth, width = index(plan.depth), index(plan.width)
    except TypeError:
        raise OwnClassError(f"`plan` answered {plan}, whose depth and width must be whole numbers") from None
    ends = [float(plan.stop_logp), float(plan.stop_token_logp), float(plan.least_forward_logp)]
    if any(map(isnan, ends)):
        raise OwnClassError(f"`plan` answered {plan}: where its draft ends is no number")
    return DraftPlan(max(0, min(depth, request.max_draft)), max(1, min(width, request.max_width)), *ends)


def _checked_nodes(selected: Sequence[Int32], trees: TreeBatch) -> list[Int32]:
    """The nodes as arrays, if all are what `Policy.select` says."""
    arrays = [np.asarray(nodes) for nodes in selected]
    if all(array.ndim == 1 and array.dtype.kind in "iu" and len(array) for array in arrays):
        counts = np.array(list(map(len, arrays)))
        chosen, sizes = np.concatenate(arrays), trees.sizes.repeat(counts)
        if not np.count_nonzero((chosen < 0) | (chosen >= sizes)):
            place = chosen + trees.offsets[:-1].repeat(counts)
            kept = np.zeros(trees.num_nodes, dtype=np.bool_)
            kept[place] = True
            is_rising = not np.count_nonzero(place[1:] <= place[:-1])
            if is_rising and kept[trees.offsets[:-1]].all() and kept[trees.above[place]].all():
                return [cast(Int32, array.astype(np.int32, copy=False)) for array in arrays]
    faults = [_fault(array, tree) for array, tree in zip(arrays, trees, strict=True)]
    raise OwnClassError(next(fault for fault in faults if fault))


def _fault(nodes: np.ndarray, tree: TokenTree) -> str:
    """What is wrong with the nodes selected of one tree; empty if nothing is."""
    told = f"`select` answered {_short(nodes.tolist())} for a tree of {len(tree)} nodes"
    if nodes.dtype == np.bool_:
        return f"{told}: it must name nodes by index, as np.flatnonzero makes of a mask"
    if nodes.ndim != 1 or (len(nodes) and nodes.dtype.kind not in "iu"):
        return f"{told}: it must name nodes by index, in one array of whole numbers"
    if not len(nodes) or nodes[0] != 0:
        return f"{told}: the first must be 0, the root"
    if (nodes < 0).any() or (nodes >= len(tree)).any():
        return f"{told}: there is no such node"
    if (nodes[1:] <= nodes[:-1]).any():
        return f"{told}: nodes must be ascending, each once"
    if not np.isin(tree.parent[nodes[1:]], nodes).all():
        return f"{told}: it lacks the parent of one of them"
    return ""


def _short(value: object) -> str:
    """A value as far as it is worth reading in a log."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
