"""One drafter instance as the scheduler sees it: what it can do, whom it serves, what it was asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cluster.requests import Request
from drafters.messages import DraftItem, DraftPlan
from drafters.protocol import Capabilities
from engine.proposals import Proposals

# A prefetch: catch up on what was committed, and draft nothing.
READ = DraftPlan(depth=0)


@dataclass(slots=True)
class OutstandingDraft:
    """A draft call sent and not answered.

    Attributes:
        call_id: of the call.
        sent_at: when.
        predicted_s: what the cost model expects of it; 0 if it need not be learnt from.
        request_ids: who is drafted for.
        depth, width: of its largest plans; of what was proposed beside the target, of that.
        num_read: tokens of its requests that the drafter had not heard.
        num_context: tokens of its requests.
        layers_s: what the profile says of the layers that it came to, once answered.
    """

    call_id: int
    sent_at: float
    predicted_s: float
    request_ids: tuple[str, ...]
    depth: int
    width: int
    num_read: int = 0
    num_context: int = 0
    layers_s: float = 0.0

    @classmethod
    def of(
        cls,
        call_id: int,
        items: Sequence[DraftItem],
        sent_at: float,
        predicted_s: float,
        num_context: int = 0,
    ) -> OutstandingDraft:
        """The call with these items."""
        return cls(
            call_id=call_id,
            sent_at=sent_at,
            predicted_s=predicted_s,
            request_ids=tuple([item.request_id for item in items]),
            depth=call_depth(items),
            width=call_width(items),
            num_read=sum([len(item.tokens if item.spec is None else item.spec.tokens) for item in items]),
            num_context=num_context,
        )


@dataclass(slots=True)
class DrafterState:
    """One drafter instance.

    Attributes:
        name: of the instance.
        capabilities: what it can do.
        max_requests: requests it serves at once (SPIN's B_j).
        kind: of the instances with the same model.
        size: orders kinds by size.
        is_draining: whether it gets no new requests, as it is to be given up.
        is_drained: whether it was said that nothing is left on it.
        is_late: whether it owes an answer for longer than a step waits; nobody is assigned to it meanwhile.
        served: requests assigned to it.
        outstanding: unanswered calls by id.
        release: requests it is to forget with its next call.
        known: requests it was told of.
        reading: of those, the ones being prefetched now.
    """

    name: str
    capabilities: Capabilities
    max_requests: int
    kind: str
    size: int
    is_draining: bool = False
    is_drained: bool = False
    is_late: bool = False
    served: set[str] = field(default_factory=set)
    outstanding: dict[int, OutstandingDraft] = field(default_factory=dict)
    release: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    reading: set[str] = field(default_factory=set)

    def can_the_same(self, other: DrafterState) -> bool:
        """Whether the other is an instance of the same kind that does as much for as many requests."""
        mine = (self.capabilities, self.max_requests, self.kind, self.size)
        return mine == (other.capabilities, other.max_requests, other.kind, other.size)

    def num_unread(self, request: Request) -> int:
        """Tokens of the request that the drafter has not heard."""
        if request.request_id in self.known:
            return request.num_tokens - request.heard.get(self.name, 0)
        return request.num_tokens

    def forget(self, request_id: str) -> None:
        """The drafter is to release the request with its next call, if it knows it."""
        self.reading.discard(request_id)
        if request_id in self.known:
            self.known.discard(request_id)
            self.release.append(request_id)


class Shaped(Protocol):
    """What a draft of one request is to be, and what it is made from."""

    @property
    def plan(self) -> DraftPlan:
        """Its shape."""
        ...

    @property
    def proposals(self) -> Proposals | None:
        """What was proposed beside the target, if anything was."""
        ...


def call_width(items: Sequence[Shaped]) -> int:
    """Nodes of a layer that a draft call with these items is to be paid for.

    Those of its widest plan, or of the beams that were grown beside the target already; decoding heads cost
    the same for any number.
    """
    width = 0
    for item in items:
        beam = item.proposals.parent if item.proposals is not None else None
        width = max(width, item.plan.width if beam is None else beam.shape[1])
    return width


def call_depth(items: Sequence[Shaped]) -> int:
    """Layers that a draft call with these items is to be paid for.

    Those of its deepest plan; but what is proposed beside the target has been, perhaps more than it uses.
    """
    evaluated = deepest = 0
    for item in items:
        if item.proposals is not None:
            evaluated = max(evaluated, len(item.proposals.token))
        if item.plan.depth > deepest:
            deepest = item.plan.depth
    return evaluated or deepest
