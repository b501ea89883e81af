"""What a speculation policy is asked (design, idea 4): which shape to draft, which nodes to verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from cluster.calibration import Calibration
from cluster.config import PolicyConfig
from cluster.cost_model import CostModel
from cluster.phase_trace import noted_budget
from drafters.messages import DraftPlan
from engine.stop_rules import StopRule
from engine.tree import TokenTree

Int32 = NDArray[np.int32]


# A struct, not a dataclass: one is made per request and step, and structs are made five times faster.
class DecodeRequest(msgspec.Struct, frozen=True, gc=False):
    """A request about to be drafted for or verified, in the papers' terms.

    Attributes:
        request_id: the request.
        drafter: who drafts for it; empty if nobody does.
        num_decoded: o, tokens decoded after the first.
        decoding_s: l, seconds since the first token.
        tpot_s: the objective in seconds per token; None without one.
        max_draft: most tokens it may draft now (what remains of its output, context window, its own wish).
        max_width: widest beam its drafter can make.
        num_context: tokens of its sequence.
        rate: estimated acceptance rate of its drafter on it.
        num_remaining: most tokens it may still generate.
        num_heads: if its drafter is the target's decoding heads, how many there are; else 0. Their candidates
            of a layer are the same after every node of the layer before.
    """

    request_id: str
    drafter: str
    num_decoded: int
    decoding_s: float
    tpot_s: float | None
    max_draft: int
    max_width: int
    num_context: int
    rate: float
    num_remaining: int = 1 << 20
    num_heads: int = 0

    def required(self, step_s: float) -> float:
        """A(r) = (l + t_spec) / t_tpot - o (AdaServe): tokens it needs from a step of `step_s` seconds."""
        if self.tpot_s is None:
            return 0.0
        return (self.decoding_s + step_s) / self.tpot_s - self.num_decoded


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a policy may read besides the requests.

    Attributes:
        cost: forward-time model of target and drafters.
        calibration: acceptance probability from draft probability.
        step_s: t_spec, recent seconds of one whole iteration.
        draft_s: predicted seconds of drafting the trees at hand, by the depth they came to (for selection).
        plain_overhead_s, draft_overhead_s: seconds of a step outside forwards and drafting, without and
            with a draft call in it.
        prompt_share: share of the steps' room for prompt tokens that prompts take: at 1 what is fixed in a
            step is spent on them whether or not anything is decoded.
        prompts_s: seconds that prompts added to the last step's forward, as predicted.
        prompt_rows: rows of prompts that are expected in the step's forward, beside those of decoding.
        step: number of the step, for policies that probe now and then.
        is_ahead: whether the step is planned while the one before is at the target, whose tokens are not
            counted yet. Of its drafts nothing is selected: all of them are verified. Requests are shown as if
            all that can be proposed for them were; as deep as planned is asked for next.
        sends_ahead: whether plain steps may be sent ahead, as far as it is known beforehand that they are.
    """

    cost: CostModel
    calibration: Calibration
    step_s: float
    draft_s: float
    plain_overhead_s: float
    draft_overhead_s: float
    step: int
    prompt_share: float = 0.0
    prompts_s: float = 0.0
    prompt_rows: int = 0
    sends_ahead: bool = False
    is_ahead: bool = False


class Policy(Protocol):
    """A named way to speculate.

    One that says `plans_ahead = True` may be asked for plans while the step before is at the target
    (`StepContext.is_ahead`), where what is proposed beside that is drafted from.
    """

    def plan(self, batch: Sequence[DecodeRequest], context: StepContext) -> list[DraftPlan]:
        """The shape drafting may take for each request; depth 0 drafts nothing."""
        ...

    def select(
        self, batch: Sequence[DecodeRequest], trees: Sequence[TokenTree], context: StepContext
    ) -> list[Int32]:
        """Per request the nodes to verify: ascending, with the root, closed under parent."""
        ...


@runtime_checkable
class StopsDrafting(Protocol):
    """A policy that has drafters look at the whole batch after every layer."""

    def stop_rule(
        self, drafter: str, num_drafting: int, batch: Sequence[DecodeRequest], context: StepContext
    ) -> StopRule | None:
        """The rule of one call, which drafts for `num_drafting` requests of the batch planned for last.

        None where each request's own plan says enough.
        """
        ...


@runtime_checkable
class Rests(Protocol):
    """A policy that knows for some steps ahead that it will draft nothing, and need not be asked."""

    def rests(self, num_requests: int, step: int) -> bool:
        """Whether `plan` would draft nothing for so many requests in this step."""
        ...


@runtime_checkable
class LooksAhead(Protocol):
    """A policy that rests, and can look before a rest ends, so that no step waits for a look in vain.

    One that says `tries_drafts = False` never drafts where it does not pay. Then it is for the engine to have
    the target's heads propose at times, and where there are any it is not asked to look.
    """

    def look_ahead(self, batch: Sequence[DecodeRequest], context: StepContext) -> None:
        """Rest on if `plan` would surely draft nothing for these in the step of `context`."""
        ...


class PolicyFactory(Protocol):
    """Makes a policy from its configuration."""

    def __call__(self, config: PolicyConfig) -> Policy:
        """The policy."""
        ...


def all_nodes(trees: Sequence[TokenTree]) -> list[Int32]:
    """Verify everything that was drafted."""
    return [np.arange(len(tree), dtype=np.int32) for tree in trees]


def same_shape(batch: Sequence[DecodeRequest], depth: int, width: int) -> list[DraftPlan]:
    """One depth and width for all, within each request's limits."""
    return [
        DraftPlan(depth=min(depth, request.max_draft), width=min(width, request.max_width))
        for request in batch
    ]


def hardware_budget(config: PolicyConfig, num_requests: int, context: StepContext) -> int:
    """B, tokens of a verify step: as configured, else the knee of the measured roofline."""
    return noted_budget(config.verify_budget or context.cost.knee(num_requests))


def clip(value: float, low: float, high: float) -> int:
    """`value` rounded down and held within bounds; `high` wins where they cross."""
    return int(min(max(int(value), low), high))
