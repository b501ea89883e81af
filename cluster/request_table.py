"""A cell's requests: who waits, who runs, how they leave, and what front ends are told of it."""

from __future__ import annotations

from bisect import insort

from msgspec.structs import replace

from cluster import admission
from cluster.batching.common import arrival_order
from cluster.batching.micro_batches import MicroBatches
from cluster.door import Door
from cluster.events import Action, Emit, Reject
from cluster.planning import StepPlanner
from cluster.request_receipt import receipt
from cluster.requests import Request, State, Trigger
from cluster.stream_messages import Rejected, TokenEvent
from cluster.verify_calls import VerifyCalls


class RequestTable:
    """Who is here, in what order, and the books that others keep of them, which are told when they go.

    Attributes:
        requests: everybody, by id.
        waiting: for a place, by priority and arrival.
        running: by id, in the order they were admitted in.
        actions: that answer the present event.
        emitted: news for front ends that come with them, by front end.
    """

    def __init__(
        self, planner: StepPlanner, verify_calls: VerifyCalls, micro_batches: MicroBatches, door: Door
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: dict[str, Request] = {}
        self.actions: list[Action] = []
        self.emitted: dict[str, list[TokenEvent]] = {}
        self._planner = planner
        self._verify_calls = verify_calls
        self._micro_batches = micro_batches
        self._door = door

    def begin(self, actions: list[Action]) -> None:
        """Another event: what is left to do from before comes first."""
        self.actions, self.emitted = actions, {}

    def answer(self) -> list[Action]:
        """What the event came to, with news for each front end in one message."""
        self.actions.extend([Emit(client, events) for client, events in self.emitted.items()])
        return self.actions

    def tell(self, request: Request, event: TokenEvent) -> None:
        """News of a request for its front end."""
        self.emitted.setdefault(request.client, []).append(event)

    def queue(self, request: Request) -> None:
        """It waits for a place."""
        insort(self.waiting, request, key=arrival_order)

    def admit(self, request: Request) -> None:
        """It has a place."""
        self.waiting.remove(request)
        request.advance(Trigger.ADMITTED)
        self._micro_batches.join(request, self.running.values())
        self.running[request.request_id] = request

    def preempt(self, request: Request, cell: admission.RunningCell, *, lost: bool = False) -> int:
        """Back to the queue, KV given up; `lost` when the target already has forgotten it.

        Returns:
            KV slots that are free with the next call because of it.
        """
        num_free = 0
        if request.opened and not lost:
            self._verify_calls.release(request)
            num_free = admission.given_back(request, cell)
        request.preempt(lost=lost)
        self._planner.pool.leave(request)  # its place is for those who run
        request.num_preemptions += 1
        self._planner.totals.preemptions += 1
        del self.running[request.request_id]
        self.queue(request)
        return num_free

    def turn_away(self, request: Request, rejection: Rejected, now: float) -> None:
        """It was taken, and is refused after all."""
        self.leave(request, now)
        self.actions.append(Reject(request.client, rejection))

    def finish(self, request: Request, reason: str, now: float, event: TokenEvent | None = None) -> None:
        """It has ended; its front end is told why, with its last tokens if there are any."""
        self.leave(request, now)
        account = receipt(request, now)
        self._door.ended(request, reason, account, now, self.running.values())
        event = event or TokenEvent(request_id=request.request_id, position=len(request.output), tokens=[])
        self.tell(request, replace(event, finish_reason=reason, receipt=account))

    def leave(self, request: Request, now: float) -> None:
        """It is here no more, wherever it was."""
        if request.state is State.WAITING:
            if request in self.waiting:
                self.waiting.remove(request)
        elif request.opened:
            self._verify_calls.release(request, has_ended=True)
        request.advance(Trigger.FINISH)
        self.running.pop(request.request_id, None)
        del self.requests[request.request_id]
        self.actions.extend(self._planner.forget(request, now, self.running.values()))
        self._micro_batches.forget(request)
