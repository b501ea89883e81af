"""The configured batching rule and what it is told each time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from cluster.batching.background import comes_behind, taking_part
from cluster.batching.base import Admission, BatchContext, BatchingRule, HoldsBack, TakesPlaces
from cluster.batching.common import has_objective
from cluster.batching.fair_queue import FairQueue
from cluster.batching.pace import Pace
from cluster.batching.registry import make_rule
from cluster.chunk_size import chunk_tokens
from cluster.config import SchedulerConfig
from cluster.cost_model import CostModel
from cluster.drafter_pool import DrafterPool
from cluster.headroom import BackgroundHeadroom, Headroom
from cluster.requests import Request
from cluster.running_mean import RunningMean


@dataclass(frozen=True, slots=True)
class Turn:
    """When one of those waiting is expected to be admitted.

    Attributes:
        ahead: who of the others is before it, in order; None if it is admitted now, or as soon as the call
            under way is answered and who is in it can give way.
        admission: of whom that is so besides.
    """

    ahead: list[Request] | None
    admission: Admission


@dataclass(slots=True)
class Batcher:
    """A cell's batching rule, its limits, and how iterations have gone lately."""

    config: SchedulerConfig
    cost: CostModel
    pool: DrafterPool
    fair: FairQueue = field(default_factory=FairQueue)
    # How far predictions must lie below objectives, learned at the door; also for the background's sake.
    headroom: Headroom = field(default_factory=Headroom)
    background_headroom: BackgroundHeadroom = field(default_factory=BackgroundHeadroom)
    # Whether the target keeps a common beginning of prompts once.
    shares_prompts: bool = False
    rule: BatchingRule = field(init=False)
    _holds_back: HoldsBack | None = field(init=False)
    pace: Pace = field(init=False)
    _chunk_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.rule = rule = make_rule(self.config.batching)
        self._holds_back = rule if isinstance(rule, HoldsBack) else None
        self._chunk_tokens = chunk_tokens(self.config, self.cost.profile.target)
        self.pace = Pace(RunningMean(self.cost.profile.overhead_s))

    def admit(
        self, waiting: Sequence[Request], running: Collection[Request], context: BatchContext
    ) -> Admission:
        """Who is admitted now, between tenants by what they have had and within one by the rule."""
        held = self._held_back(waiting, running, context)
        return self.fair.admit(self.rule, waiting, running, context, held)

    def may_take_place(
        self, waiting: Sequence[Request], running: Collection[Request], context: BatchContext
    ) -> bool:
        """Whether the rule may soon take a place from one who runs, which it does from nobody in a call."""
        rule = self.rule
        return isinstance(rule, TakesPlaces) and rule.may_take_place(waiting, running, context)

    def taking_part(
        self, running: Collection[Request], beginning: Collection[Request] = ()
    ) -> Collection[Request]:
        """Whom the next steps are for: with a rule that has a background, nobody who sits out in it."""
        return running if self._holds_back is None else taking_part(running, beginning)

    def gives_way(self, request: Request) -> bool:
        """Whether it has only the time that requests of the usual priority with objectives leave."""
        return self._holds_back is not None and comes_behind(request.submit)

    def in_order(
        self, waiting: Sequence[Request], running: Collection[Request], context: BatchContext
    ) -> list[Request]:
        """The waiting requests as they are expected to be admitted, those held back last."""
        return self._in_order(waiting, context, self._held_back(waiting, running, context))

    def ahead_of(
        self,
        newcomer: Request,
        waiting: Sequence[Request],
        running: Collection[Request],
        context: BatchContext,
    ) -> Turn:
        """When one of those waiting is expected to be admitted."""
        held = self._held_back(waiting, running, context)
        context = replace(context, is_answered=True)
        admission = self.fair.proposed(self.rule, waiting, running, context, held)
        if newcomer in admission.admitted:
            return Turn(None, admission)
        ordered = self._in_order(waiting, context, held)
        return Turn(ordered[: ordered.index(newcomer)], admission)

    def _in_order(
        self, waiting: Sequence[Request], context: BatchContext, held: frozenset[Request]
    ) -> list[Request]:
        ordered = self.fair.in_order(self.rule, waiting, context)
        return sorted(ordered, key=held.__contains__) if held else ordered

    def _held_back(
        self, waiting: Sequence[Request], running: Collection[Request], context: BatchContext
    ) -> frozenset[Request]:
        """Requests without objectives that are not admitted now for the sake of those that have some."""
        best_effort = [request for request in waiting if not has_objective(request)]
        if not best_effort or self._holds_back is None:
            return frozenset()
        if len(best_effort) == len(waiting) and not any(map(has_objective, running)):
            return frozenset()  # there is nobody for whose sake, and a long queue need not be put in order
        ordered = self.fair.in_order(self.rule, best_effort, context)
        return frozenset(self._holds_back.held_back(ordered, waiting, running, context))

    def context(self, now: float, free_slots: int, step_s: float) -> BatchContext:
        """What the rule may read now."""
        draft_left_s = 0.0
        for drafter in self.pool.drafters.values():
            for call in drafter.outstanding.values():
                if call.predicted_s > 0.0:  # else it only reads, and nobody waits for it
                    draft_left_s = max(draft_left_s, call.sent_at + call.predicted_s - now)
        return BatchContext(
            now=now,
            cost=self.cost,
            max_running=self.config.max_running,
            chunk_tokens=self._chunk_tokens,
            whole_tokens=self.config.max_whole_tokens,
            ageing_s=self.config.ageing_ms / 1e3,
            free_slots=free_slots,
            step_s=step_s,
            prompt_token_s=self.cost.prompt_token_seconds(),
            beside_s=self.pace.beside_s.value,
            draft_left_s=draft_left_s,
            overlaps=self.config.micro_batches != 1,
            num_rows=self.pace.num_rows.value,
            num_committed=self.pace.num_committed.value,
            num_prefilled=self.pace.num_prefilled,
            headroom=self.headroom.value(now),
            background_headroom=self.background_headroom.value(now),
            tier_priorities=self.fair.tier_priorities,
            shares_prompts=self.shares_prompts,
        )
