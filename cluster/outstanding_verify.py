"""A verify call that the target has not answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.call_parts import NO_ROWS, CallParts, Rows
from cluster.requests import Request, State
from drafters.messages import DraftPlan
from engine.proposals import Proposals
from engine.tree import TokenTree


@dataclass(slots=True)
class OutstandingVerify:
    """The verify call the target is working on.

    Attributes:
        call_id: its id.
        drafted: whether anything was drafted for its requests, though none of it may be verified.
        decoding: rows of its trees.
        parts: what the cost model expects of its forward; once answered, of the rows that were computed.
        trees: draft trees being verified, by request id.
        prefilling: requests with a chunk in it, and the chunk's tokens, at most.
        ending: those of them whose prompt ends with it, unless slots are fewer than they seemed.
        plans: of one that was planned ahead, the shapes of draft trees that were not known yet; else None.
        planned_by: whom its requests then had as drafter, which may be gone when it begins.
        proposed: what those trees were grown from, once they are.
        reading: rows of its chunks.
        proposes: whether something is proposed beside it, after its forward.
        members: all of them as they were: each with how often it had been preempted.
        num_tokens: rows, and so KV slots it may take.
        decides_one: whether it decides exactly one token of each request that decodes.
        sent_at: when it was sent; of one sent ahead, once the call before is answered, when that was.
        is_ahead: whether it was sent before the call that decides its requests' last tokens was answered,
            and that still is not.
        num_ahead: how many calls in a row, this one the last, were sent so.
    """

    call_id: int
    drafted: bool
    decoding: Rows
    parts: CallParts
    trees: dict[str, TokenTree]
    prefilling: dict[str, int]
    ending: list[str]
    members: dict[str, tuple[Request, int]]
    num_tokens: int
    decides_one: bool
    sent_at: float
    is_ahead: bool = False
    num_ahead: int = 0
    plans: Mapping[str, DraftPlan] | None = None
    planned_by: Mapping[str, str] = field(default_factory=dict)
    proposed: dict[str, Proposals] = field(default_factory=dict)
    reading: Rows = NO_ROWS
    proposes: bool = False

    @property
    def was_ahead(self) -> bool:
        """Whether it was sent before the call before was answered."""
        return self.num_ahead > 0

    @property
    def predicted_s(self) -> float:
        """Seconds that its forward should take."""
        return self.parts.seconds

    def has(self, request: Request) -> bool:
        """Whether the request is in it, and not one that has its name, or itself before it was preempted."""
        return self.members.get(request.request_id) == (request, request.num_preemptions)

    def goes_on_with(self, request: Request) -> bool:
        """Whether it has what comes next of a request for which the call before had no slots.

        That is its decoding, or the next part of its prompt, if the target was told of the prompt before.
        """
        if request.state is State.PREFILL_SENT:
            return request.num_computed > 0 and request.request_id in self.prefilling
        return request.request_id in self.trees

    def awaits(self, request: Request) -> bool:
        """Whether the request still waits for this call, and was not preempted or given up meanwhile.

        One that came again, by its name or after a preemption, may have a chunk in the call after this one.
        """
        if not self.has(request):
            return False
        is_verified = request.request_id in self.trees
        return request.state is (State.VERIFYING if is_verified else State.PREFILL_SENT)

    def lacks(self, request: Request) -> bool:
        """Whether the target, which says that it does not know the request, is to be told of it anew.

        Also where nobody waits for this call: its chunk may have come after the end of a prompt of which more
        was cached than was thought. One of which nothing is computed waits for slots, and is told anyway.
        """
        return self.awaits(request) or (request.num_computed > 0 and self.has(request))
