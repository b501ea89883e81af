"""One drafter instance as the scheduler sees it: what it can do, whom it serves, what it was asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from drafters.protocol import Capabilities


@dataclass(slots=True)
class OutstandingDraft:
    """A draft call sent and not answered.

    Attributes:
        call_id: of the call.
        sent_at: when.
        predicted_s: what the cost model expects of it; once answered, of the depth that it came to.
        request_ids: who is drafted for.
        depth, width: of its largest plans.
    """

    call_id: int
    sent_at: float
    predicted_s: float
    request_ids: tuple[str, ...]
    depth: int
    width: int


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
    served: set[str] = field(default_factory=set)
    outstanding: dict[int, OutstandingDraft] = field(default_factory=dict)
    release: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    reading: set[str] = field(default_factory=set)
