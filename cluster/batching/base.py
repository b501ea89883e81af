"""What a batching rule is asked: who is admitted, who decodes, how much of whose prompt is prefilled."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import msgspec

from cluster.admission import Room
from cluster.cost_model import CostModel
from cluster.requests import Request

# A request to prefill and the most tokens of it to compute in one verify call.
Chunk = tuple[Request, int]


# A struct, not a dataclass: several are made per step, and structs are made several times faster.
class BatchContext(msgspec.Struct, frozen=True, gc=False):
    """What a rule may read besides the requests, which it must not change.

    Attributes:
        now: the scheduler's clock, in seconds.
        cost: forward-time model of the target.
        max_running: requests that may run at once.
        chunk_tokens: most prompt tokens of a verify call, for rules that cut prompts into chunks.
        whole_tokens: the same for rules that prefill prompts whole; the first may exceed it by itself.
        ageing_s: waiting so long lifts a request by one priority level, in a rule that lets requests age.
        free_slots: KV slots available to the next call.
        step_s: recent seconds of one whole iteration.
        prompt_token_s: predicted seconds of one more token of a prompt in a call.
        beside_s: recent seconds of an iteration outside the target's forward (drafting, messages).
        draft_left_s: predicted seconds until the drafting under way ends; 0 if nobody drafts.
        overlaps: whether there may be several micro-batches, of which one drafts while another is verified.
        num_rows: recent mean of tokens a decoding request has in a verify call (its draft tree).
        num_committed: recent mean of tokens a decoding request gets from a verify call.
        num_prefilled: recent mean of prompt tokens computed per request and call it decodes in.
        headroom: share by which a prediction must be below an objective for few to be late.
        background_headroom: the same for next to none to be late for the sake of the background.
        tier_priorities: of service tiers by name, where they have one.
        shares_prompts: whether the target keeps a common beginning of prompts once.
        is_answered: whether the call under way counts as answered, as where it is asked who comes next.
    """

    now: float
    cost: CostModel
    max_running: int
    chunk_tokens: int
    whole_tokens: int
    ageing_s: float
    free_slots: int
    step_s: float
    prompt_token_s: float
    beside_s: float = 0.0
    draft_left_s: float = 0.0
    overlaps: bool = False
    num_rows: float = 1.0
    num_committed: float = 1.0
    num_prefilled: float = 0.0
    headroom: float = 0.0
    background_headroom: float = 0.0
    tier_priorities: Mapping[str, int] = {}
    shares_prompts: bool = False
    is_answered: bool = False

    def room(self, running: Collection[Request], max_running: int | None = None) -> Room:
        """Room for more beside those running, of whom there may be fewer than `max_running` of the step."""
        most = self.max_running if max_running is None else min(self.max_running, max_running)
        return Room.beside(running, self.free_slots, most, shares_prompts=self.shares_prompts)

    def comes_first(self, one: Request, other: Request) -> bool:
        """Whether `one` is more urgent by its priority; between tenants by that of its tier (`victim`)."""
        mine, theirs = one.submit, other.submit
        if mine.tenant.label == theirs.tenant.label:
            return mine.priority < theirs.priority
        of_tier = self.tier_priorities
        return of_tier.get(mine.tier, 0) < of_tier.get(theirs.tier, 0)


@dataclass(frozen=True, slots=True)
class Admission:
    """Who joins the running requests, in order, and who gives its KV up for them first."""

    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


@runtime_checkable
class OrdersQueue(Protocol):
    """A rule that does not admit by (priority, arrival), and says by what; admission predicts from it."""

    def order(self, request: Request, context: BatchContext) -> tuple[float, ...]:
        """Sorting key of a waiting request; smaller is admitted earlier."""
        ...


@runtime_checkable
class HoldsBack(Protocol):
    """A rule that lets requests without objectives wait for the sake of those that have some."""

    def held_back(
        self,
        best_effort: Sequence[Request],
        waiting: Sequence[Request],
        running: Collection[Request],
        context: BatchContext,
    ) -> Sequence[Request]:
        """Who of the waiting requests without objectives is not admitted now.

        Args:
            best_effort: those, in the order they are to be admitted in.
            waiting: all that wait.
            running: everybody admitted.
            context: the rest.
        """
        ...


@runtime_checkable
class TakesPlaces(Protocol):
    """A rule that takes a place from one who runs for one who waits, if that one is in no call."""

    def may_take_place(
        self, waiting: Sequence[Request], running: Collection[Request], context: BatchContext
    ) -> bool:
        """Whether it may come to that soon for some of these, were nobody in a call."""
        ...


class BatchingRule(Protocol):
    """A named way to form batches. Answers depend on the arguments alone.

    A rule is work-conserving: with nobody running it admits somebody; of requests that are ready while
    no other is being worked on, somebody decodes; and a verify call that could have content has some.
    """

    def admit(
        self, waiting: Sequence[Request], running: Collection[Request], context: BatchContext
    ) -> Admission:
        """Which waiting requests are admitted now; `waiting` comes by (priority, arrival)."""
        ...

    def decode(
        self, ready: Sequence[Request], members: Collection[Request], context: BatchContext
    ) -> list[Request]:
        """Which prefilled requests begin an iteration now: they are drafted for and then verified.

        The others keep their KV and are offered again.

        Args:
            ready: whom to choose among.
            members: everybody in their micro-batch; some may have their drafts already and wait for a call.
            context: the rest.
        """
        ...

    def verify(
        self, drafted: Sequence[Request], prefilling: Sequence[Request], running: Collection[Request]
    ) -> list[Request]:
        """Which of those whose drafts are in are verified by the next call; the others wait."""
        ...

    def prefill(
        self,
        prefilling: Sequence[Request],
        verifying: Sequence[Request],
        num_rows: int,
        running: Collection[Request],
        context: BatchContext,
    ) -> list[Chunk]:
        """How many tokens of whose prompt are computed in the same call.

        Args:
            prefilling: admitted requests whose sequence is not in the KV pool yet.
            verifying: requests whose draft trees are in the call.
            num_rows: tokens of those trees together.
            running: everybody admitted.
            context: the rest.
        """
        ...
