"""A front end's connections to all cells: routes requests, moves them when their cell is lost or leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence

from cluster.members import REPORT_INTERVAL_S, SILENT_S, Member
from cluster.stream_messages import (
    Cancel,
    CellMessage,
    NumCancelled,
    Rejected,
    Submit,
    TokenBatch,
    TokenEvent,
)
from deployments.cancelled_everywhere import CancelledEverywhere
from deployments.cell_connection import ATTEMPT_TIMEOUT_S, CellConnection
from deployments.cell_router import CellRouter
from deployments.cell_source import CellSource
from deployments.moving_requests import to_move
from deployments.pending_requests import PASSING, PASSING_IF_PROMISED, CellLost, Pending, RequestRejected

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
# Who waits for a place asks again so often, or more of them, as when a cell was lost, in turn: to refuse one
# takes a full cell up to a millisecond.
_REFUSED_PAUSE_S, _ASK_PAUSE_S = 0.1, 0.02
# A directory that has just been replaced may have heard of the starting cells only: a request waits so long
# for one that serves. After that all are starting, and the client should know.
_UNHEARD_S = 20 * REPORT_INTERVAL_S
# Queues are evened out so often.
_RELIEVE_PAUSE_S = 1.0


class CellClients:
    """Submits requests and hands their tokens out; survives the loss of connections and of cells.

    One TCP connection per cell carries all requests there. A request goes to the cell that `CellRouter`
    names. When that is lost, or gives it back since it is being removed, it is submitted to another with
    prompt and output so far, and goes on with the same text (design, 2 and 3); when there is no other, it
    waits for one. A refusal that another cell need not share is passed on only after all have refused.

    Args:
        source: which cells there are; requests that none has end with `CellLost` once it says that those to
            come are of no use to them.
        give_up_after_s: how long requests wait while no cell can be reached, before they end with `CellLost`.
        silent_s: a cell that has given no sign of life for so long is left although its connection stands:
            it hangs, or its machine is cut off. So is one that the source has not named for so long, if there
            are others.

    Attributes:
        num_resubmitted: requests sent again because their cell was lost.
        num_silent: connections given up as the cell gave no sign of life.
        num_rejected: requests answered with a refusal, by code and tier; counted by who answers, as those
            that are choices of one answer are refused together.
    """

    def __init__(
        self, source: CellSource, *, give_up_after_s: float = 120.0, silent_s: float = SILENT_S
    ) -> None:
        self._source = source
        self._give_up_after_s = give_up_after_s
        self._silent_s = silent_s
        self._router = CellRouter()
        self._pending: dict[str, Pending] = {}
        self._connections: dict[str, CellConnection] = {}
        self._pauses: dict[str, tuple[float, float]] = {}
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._unreached_since: float | None = None
        self._relieve_at = 0.0
        self._cancels = CancelledEverywhere()
        self.num_resubmitted = self.num_silent = 0
        self.num_rejected: Counter[tuple[str, str]] = Counter()
        self._turned_at = 0.0

    @property
    def is_connected(self) -> bool:
        """Whether requests can be sent right now."""
        return any(connection.is_open for connection in self._connections.values())

    @property
    def num_streams(self) -> int:
        """Requests whose end has not been seen."""
        return len(self._pending)

    async def submit(self, request: Submit) -> AsyncGenerator[TokenEvent, None]:
        """The request's events in order, each token exactly once, until its finish reason.

        Close the generator to give up on the request: the cell is told to stop working on it. Raises
        `RequestRejected` and `CellLost`.
        """
        pending = Pending(request, list(request.output))
        self._ensure_running()
        self._pending[request.request_id] = pending
        # Without a connection, it is sent once there is one.
        self._place(pending)
        finished = False
        try:
            while not finished:
                event = await pending.events.get()
                if isinstance(event, Exception):
                    raise event
                finished = event.finish_reason is not None
                yield event
        finally:
            # Reached on cancellation too, so nothing here may wait.
            self._pending.pop(request.request_id, None)
            if not finished:
                self._cancel(pending)

    def cancel(self, request_id: str) -> None:
        """Ask its cell to end a request early; its last event still arrives, with the receipt."""
        pending = self._pending.get(request_id)
        if pending is not None:
            pending.is_cancelled = True
            self._cancel(pending)

    async def cancel_matching(self, prefix: str) -> int:
        """End the requests, of any front end, whose ids begin so; how many there were.

        Those of other front ends are found in cells only. Raises `TimeoutError` if a cell does not answer, or
        none can be reached now.
        """
        self._ensure_running()
        num_nowhere = 0
        for pending in self._pending.values():
            if pending.request.request_id.startswith(prefix):
                pending.is_ended = True  # should its cell be lost before it tells the end
                if not pending.cell:
                    pending.end()
                    num_nowhere += 1
        async with asyncio.timeout(ATTEMPT_TIMEOUT_S):
            while not self.is_connected:
                await asyncio.sleep(_FIRST_PAUSE_S)
            there = [connection for connection in self._connections.values() if connection.is_open]
            return num_nowhere + await self._cancels.ask(there, prefix)

    def lives(self, request_id: str) -> int:
        """How often a request in flight was begun; above one, its receipt covers the last life only."""
        pending = self._pending.get(request_id)
        return pending.lives if pending is not None else 0

    async def close(self) -> None:
        """Drop all connections; what is in flight ends with `CellLost`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for connection in list(self._connections.values()):
            await connection.close()
        self._connections.clear()
        self._fail_all("the front end is shutting down")

    def check(self, stuck_s: float) -> None:
        """Raise RuntimeError if the event loop has not turned for so long; may be called from any thread."""
        turned_s = time.monotonic() - self._turned_at
        if self._task is not None and not self._task.done() and turned_s > stuck_s + ATTEMPT_TIMEOUT_S:
            raise RuntimeError(f"an event loop of this front end has not turned for {turned_s:.0f} s")

    @property
    def can_serve(self) -> bool:
        """Whether a cell that takes requests is connected, by what the source says of it every moment.

        Other threads may ask.
        """
        connections = list(self._connections.values())  # at once: iterated, it must not change
        return self._source.poll_s is not None and any(
            one.is_open and one.member.state == "ready" for one in connections
        )

    def connect(self) -> None:
        """Begin connecting before the first request needs it."""
        self._ensure_running()

    # -- cells come and go ---------------------------------------------------------------------------

    def _ensure_running(self) -> None:
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run(), name="connections to cells")
        elif self._task.get_loop() is not loop:
            # Its tokens would be seen only when the other loop happens to wake.
            raise RuntimeError("connections to cells serve one event loop; make them for each")

    async def _run(self) -> None:
        """Follow the source; ends when no cell could be reached for too long and nobody can wait longer."""
        loop = asyncio.get_running_loop()
        self._unreached_since = None if self.is_connected else loop.time()
        pause, problem = _FIRST_PAUSE_S, "no cell is known"
        while True:
            self._turned_at = time.monotonic()
            try:
                async with asyncio.timeout(ATTEMPT_TIMEOUT_S):
                    members = await self._source.cells()
            except Exception as error:  # a remote call: anything may come out of it
                problem = repr(error)
            else:
                self._follow([member for member in members if member.endpoint is not None])
                if self._source.are_replaced:
                    self._end_homeless("cells of another configuration have taken the place of its own")
            timeout_s = self._source.poll_s
            if not self.is_connected:
                # A connection that opens wakes this up.
                timeout_s = min(pause, self._give_up_after_s / 4)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                since = self._unreached_since if self._unreached_since is not None else loop.time()
                if loop.time() - since >= self._give_up_after_s:
                    _log.error("no cell reached for %.0f s: %s", self._give_up_after_s, problem)
                    self._fail_all(f"the cell did not come back within {self._give_up_after_s:.0f} s")
                    return
            else:
                pause = _FIRST_PAUSE_S
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()

    def _follow(self, members: Sequence[Member]) -> None:
        """Connect to new cells, and take note of how the others are."""
        now = asyncio.get_running_loop().time()
        for member in members:
            connection = self._connections.get(member.id)
            if connection is not None:
                begins = member.state == "ready" != connection.member.state
                connection.named(member)
                if begins and connection.is_open:
                    self._opened(connection)
            elif self._pauses.get(member.id, (0.0, 0.0))[0] <= now:
                self._connections[member.id] = CellConnection(
                    member, self._opened, self._dispatch, self._lost, self._silent_s
                )
        named = {member.id for member in members}
        self._pauses = {cell: pause for cell, pause in self._pauses.items() if cell in named}
        others = any(self._connections[cell].is_open for cell in named & self._connections.keys())
        for cell, connection in list(self._connections.items()):
            if cell in named or not others:
                continue
            connection.missing_since = connection.missing_since or now
            if now - connection.missing_since > self._silent_s:
                _log.warning("cell %s has been silent; its requests are moved", cell)
                connection.abort()

        self._relieve(now)

    def _relieve(self, now: float) -> None:
        """Requests go to a cell that is predicted to begin them much earlier."""
        if now < self._relieve_at:
            return
        self._relieve_at = now + _RELIEVE_PAUSE_S
        for pending in list(to_move(self._pending.values(), self._connections.values(), now)):
            self._cancel(pending, is_moved=True)
            pending.withdrawn()
            self._place(pending)

    def _opened(self, connection: CellConnection) -> None:
        """A cell is connected, or serves now: those that have none are sent there."""
        self._unreached_since = None
        self._changed.set()
        for pending in list(self._pending.values()):
            if not pending.cell:
                pending.refused_by.discard(connection.member.id)
                self._place(pending)

    def _lost(self, connection: CellConnection) -> None:
        loop, cell = asyncio.get_running_loop(), connection.member.id
        self.num_silent += connection.was_silent
        if self._connections.get(cell) is connection:
            del self._connections[cell]
        # A cell that accepts and hangs up at once must not be hammered, nor one that is away.
        last = _FIRST_PAUSE_S / 2 if connection.was_open else self._pauses.get(cell, (0.0, 0.0))[1]
        pause = min(max(2 * last, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        self._pauses[cell] = loop.time() + pause, pause
        self._router.forget(cell)
        if not self.is_connected and self._unreached_since is None:
            self._unreached_since = loop.time()
        if connection.was_open:
            loop.call_later(pause, self._changed.set)
            moved = [pending for pending in self._pending.values() if pending.cell == cell]
            for pending in moved:
                pending.lost()
                self._place(pending)

    # -- requests ------------------------------------------------------------------------------------

    def _place(self, pending: Pending) -> None:
        """Send a request to the best cell that has not refused it; it stays where it is if there is none."""
        if pending.is_ended:
            pending.end()
            return
        there = [connection for connection in self._connections.values() if connection.is_open]
        willing = [one for one in there if one.member.id not in pending.refused_by]
        # Who is draining would refuse, who is starting may; better than nobody while it is not known. Who
        # drains gives back whom it had taken, which is not to be mistaken for one that others turned away.
        states = ("ready", "starting", "draining") if pending.turned_away is None else ("ready", "starting")
        for state in states:
            candidates = {one.member.id: one for one in willing if one.member.state == state}
            if candidates:
                break
        else:
            return
        request, loads = pending.request, [connection.load() for connection in candidates.values()]
        connection = candidates[self._router.choose(request, loads)]
        message = pending.next_life(connection.member.id)
        if message is None:
            return
        self.num_resubmitted += pending.was_lost
        pending.was_lost = False
        if len(there) > 1 or self._source.poll_s is not None:
            shared = self._router.placed(request, connection.load())
            to_read = len(request.prompt) - shared + len(pending.output)
            connection.note_sent(to_read, is_behind=pending.is_behind)
        connection.send(message)
        if pending.is_cancelled:
            self._cancel(pending)

    def _cancel(self, pending: Pending, *, is_moved: bool = False) -> None:
        connection = self._connections.get(pending.cell)
        if connection is not None:
            connection.send(Cancel(pending.wire_id, pending.is_cancelled, is_moved))

    def _dispatch(self, connection: CellConnection, message: CellMessage) -> None:
        if isinstance(message, TokenBatch):
            for event in message.events:
                pending = self._find(event.request_id)
                if pending is not None:
                    pending.accept(event)
        elif isinstance(message, NumCancelled):
            self._cancels.answered(message)
        else:
            pending = self._find(message.request_id)
            if pending is not None:
                self._refused(pending, message, connection.member)

    def _find(self, wire_id: str) -> Pending | None:
        pending = self._pending.get(wire_id.partition("~")[0])
        # Of an earlier life, or of a request whose client is gone: no one is waiting for it.
        return pending if pending is not None and pending.wire_id == wire_id else None

    def _refused(self, pending: Pending, rejected: Rejected, cell: Member) -> None:
        loop = asyncio.get_running_loop()
        pending.refused(rejected)
        if rejected.code not in (PASSING_IF_PROMISED if pending.is_promised else PASSING):
            self._fail(pending, RequestRejected(rejected))
            return
        if rejected.code == "draining":
            # It may have been in that cell's queue for long. Another cell takes it, or one that comes.
            pending.is_promised = True
        self._place(pending)
        if pending.cell:
            return
        if pending.refused_at is None:
            pending.refused_at = loop.time()
        patience_s = 0.0
        if pending.is_promised:
            # That cells start anew, or are flooded by what a lost one had, is not its fault.
            patience_s = self._give_up_after_s
        elif pending.turned_away is not None:
            rejected = pending.turned_away
        elif rejected.code == "not_ready" and cell.state == "starting" and self._source.poll_s is not None:
            patience_s = _UNHEARD_S
        if loop.time() - pending.refused_at < patience_s:
            num_waiting = sum(not one.cell for one in self._pending.values())
            pause_s = max(_REFUSED_PAUSE_S, _ASK_PAUSE_S * num_waiting)
            loop.call_later(pause_s, self._place_again, pending)
        else:
            self._fail(pending, RequestRejected(rejected))

    def _place_again(self, pending: Pending) -> None:
        waiting = self._pending.get(pending.request.request_id) is pending
        # A new connection in between has already begun another life.
        if waiting and not pending.cell:
            pending.ask_all()
            self._place(pending)

    def _end_homeless(self, reason: str) -> None:
        for pending in list(self._pending.values()):
            if not pending.cell:
                self._fail(pending, CellLost(reason))

    def _fail_all(self, reason: str) -> None:
        for pending in list(self._pending.values()):
            self._fail(pending, CellLost(reason))

    def _fail(self, pending: Pending, error: Exception) -> None:
        """Its caller, who may read late, is told why no more comes; no cell is to have it any more."""
        del self._pending[pending.request.request_id]
        pending.events.put_nowait(error)
