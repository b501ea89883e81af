"""What goes into the scheduler core and what comes out (design, idea 1). No Ray, no torch, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.stream_messages import Rejected, Submit, TokenEvent
from drafters.messages import DraftCall, DraftResult
from drafters.protocol import Capabilities
from verifier.messages import VerifyCall, VerifyResult


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A front end (`client`) submits a request."""

    submit: Submit
    client: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The front end gives a request up; unknown ids are ignored (it may just have finished)."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ClientLost:
    """A front end's connection is gone; its requests are cancelled."""

    client: str


@dataclass(frozen=True, slots=True)
class DraftDone:
    """A drafter answered."""

    drafter: str
    result: DraftResult


@dataclass(frozen=True, slots=True)
class VerifyDone:
    """The target answered."""

    result: VerifyResult


@dataclass(frozen=True, slots=True)
class DrafterReady:
    """A drafter started, or came back empty after a loss.

    Attributes:
        name: of the instance; calls, answers and losses name it.
        capabilities: what it can do.
        max_requests: requests it serves at once (SPIN's B_j).
        kind: of the instances with the same model, of which what is learnt holds for all; its own name if
            empty.
        size: orders kinds by size; `capabilities.num_parameters` if 0.
    """

    name: str
    capabilities: Capabilities
    max_requests: int
    kind: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True)
class DrafterDraining:
    """A drafter is to be given up: it gets no new requests, and its own leave it within the next step.

    Answered by `Drained`; whoever runs it then stops it and reports `WorkerLost`.
    """

    name: str


@dataclass(frozen=True, slots=True)
class VerifierReady:
    """The target started, or came back empty after a loss.

    Attributes:
        num_slots: tokens its KV pool holds.
        max_tokens: longest sequence (prompt and output).
        vocab_size: token ids run below this.
    """

    num_slots: int
    max_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class CellDraining:
    """The cell is being removed: it takes no more requests, and gives back those that wait.

    Attributes:
        with_running: it gives back the running ones too.
    """

    with_running: bool = False


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A drafter (by its name) or the target ("verifier") died; its unanswered calls never return."""

    name: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed without anything else happening (timeouts are looked at)."""


Event = (
    RequestArrived
    | Cancelled
    | ClientLost
    | DraftDone
    | VerifyDone
    | DrafterReady
    | DrafterDraining
    | CellDraining
    | VerifierReady
    | WorkerLost
    | Tick
)


@dataclass(frozen=True, slots=True)
class Draft:
    """Send `call` to the drafter of that name (depth 0 plans are prefetches)."""

    drafter: str
    call: DraftCall


@dataclass(frozen=True, slots=True)
class Verify:
    """Send `call` to every rank of the target. Outstanding is at most one, with several micro-batches two."""

    call: VerifyCall


@dataclass(frozen=True, slots=True)
class Emit:
    """Send `events` to a front end as one batch; an event with a finish reason ends its request."""

    client: str
    events: list[TokenEvent]


@dataclass(frozen=True, slots=True)
class Reject:
    """Tell a front end that a request is refused."""

    client: str
    rejection: Rejected


@dataclass(frozen=True, slots=True)
class Drained:
    """The draining drafter of that name serves nobody and owes no answer; said once."""

    drafter: str


Action = Draft | Verify | Emit | Reject | Drained
