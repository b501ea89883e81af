"""A front end's connection to its cell: one TCP stream for all requests, kept up across cell restarts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from cluster.stream_messages import (
    Cancel,
    CancelMatching,
    CellMessage,
    ClientMessage,
    NumCancelled,
    Rejected,
    Submit,
    TokenBatch,
    TokenEvent,
)
from cluster.transport import read_frame, write_frame
from engine import wire

_log = logging.getLogger(__name__)

#: Where a cell listens, and the token that admits a client: host, port, token.
Endpoint = tuple[str, int, bytes | str]

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_ATTEMPT_TIMEOUT_S = 5.0
_REFUSED_PAUSE_S = 0.1

#: Rejections that pass by themselves.
_PASSING = ("queue_full", "not_ready", "draining")

_decoder: wire.Decoder[CellMessage] = wire.Decoder(CellMessage)


class CellLost(Exception):
    """The cell did not come back in time; the request's outcome is unknown beyond the tokens already seen."""


class RequestRejected(Exception):
    """The cell turned the request away."""

    def __init__(self, rejected: Rejected) -> None:
        super().__init__(rejected.message)
        self.rejected = rejected


@dataclass(eq=False)
class _Pending:
    """A request whose end has not been seen.

    Attributes:
        request: as the caller submitted it.
        output: tokens received so far, which a resubmission carries.
        events: to the caller; an exception ends it.
        wire_id: the id in the life that runs now. Each life has its own, so that a cell that still holds the
            previous one neither refuses the new one nor confuses the two.
        lives: how often it was sent.
        refused_at: when the cell first turned a later life away.
    """

    request: Submit
    output: list[int]
    events: asyncio.Queue[TokenEvent | Exception] = field(default_factory=asyncio.Queue)
    wire_id: str = ""
    lives: int = 0
    refused_at: float | None = None


class CellClient:
    """Submits requests and hands their tokens out; survives the loss of the connection and of the cell.

    After a loss it asks `locate` again (a restarted cell listens elsewhere), reconnects, and resubmits what
    is unfinished with prompt and output so far; the cell continues with the same text (design, 2 and 3).

    Args:
        locate: finds the cell; called for each attempt to connect.
        give_up_after_s: how long a loss may last before waiting requests end with `CellLost`.
    """

    def __init__(self, locate: Callable[[], Awaitable[Endpoint]], *, give_up_after_s: float = 120.0) -> None:
        self._locate = locate
        self._give_up_after_s = give_up_after_s
        self._pending: dict[str, _Pending] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self.num_resubmitted = 0
        self._tickets: dict[int, asyncio.Future[int]] = {}
        self._next_ticket = 0

    @property
    def is_connected(self) -> bool:
        """Whether requests can be sent right now."""
        return self._writer is not None

    async def submit(self, request: Submit) -> AsyncGenerator[TokenEvent, None]:
        """The request's events in order, each token exactly once, until its finish reason.

        Close the generator to give up on the request: the cell is told to stop working on it. Raises
        `RequestRejected` and `CellLost`.
        """
        pending = _Pending(request, list(request.output))
        self._ensure_running()
        if self._writer is not None:
            self._send_submission(pending)
        # Registered without a writer, it is sent once the connection is there.
        self._pending[request.request_id] = pending
        finished = False
        try:
            while not finished:
                event = await pending.events.get()
                finished = isinstance(event, Exception) or event.finish_reason is not None
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            # Reached on cancellation too, so nothing here may wait.
            self._pending.pop(request.request_id, None)
            if not finished:
                self._send(Cancel(pending.wire_id))

    def cancel(self, request_id: str) -> None:
        """Ask the cell to end a request early; its last event still arrives, with the receipt."""
        pending = self._pending.get(request_id)
        if pending is not None:
            self._send(Cancel(pending.wire_id))

    async def cancel_matching(self, prefix: str) -> int:
        """End the requests, of any front end, whose ids begin so; how many the cell had.

        Raises `TimeoutError` if it does not answer, or cannot be reached now.
        """
        self._ensure_running()
        self._next_ticket += 1
        ticket = self._next_ticket
        answer = self._tickets[ticket] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(_ATTEMPT_TIMEOUT_S):
                while self._writer is None:
                    await asyncio.sleep(_FIRST_PAUSE_S)
                self._send(CancelMatching(ticket, prefix))
                return await answer
        finally:
            self._tickets.pop(ticket, None)

    def lives(self, request_id: str) -> int:
        """How often a request in flight was submitted; above one, its receipt covers the last life only."""
        pending = self._pending.get(request_id)
        return pending.lives if pending is not None else 0

    async def close(self) -> None:
        """Drop the connection; what is in flight ends with `CellLost`."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._fail_all("the front end is shutting down")

    def connect(self) -> None:
        """Begin connecting before the first request needs it."""
        self._ensure_running()

    # -- the connection ------------------------------------------------------------------------------

    def _ensure_running(self) -> None:
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run(), name="cell connection")
        elif self._task.get_loop() is not loop:
            # Its tokens would be seen only when the other loop happens to wake.
            raise RuntimeError("a connection to the cell serves one event loop; make one for each")

    async def _run(self) -> None:
        """Connect, read, and after a loss start over; ends when the cell stays away and nobody waits."""
        loop = asyncio.get_running_loop()
        lost_at, pause = loop.time(), _FIRST_PAUSE_S
        while True:
            try:
                reader, writer = await asyncio.wait_for(self._open(), _ATTEMPT_TIMEOUT_S)
            except Exception as error:  # `locate` is a remote call: anything may come out of it
                if loop.time() - lost_at >= self._give_up_after_s:
                    _log.error("cell unreachable for %.0f s: %s", self._give_up_after_s, error)
                    self._fail_all(f"the cell did not come back within {self._give_up_after_s:.0f} s")
                    return
                await asyncio.sleep(min(pause, self._give_up_after_s / 4))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                continue
            try:
                self._writer = writer
                for pending in self._pending.values():
                    self._send_submission(pending)
                pause = _FIRST_PAUSE_S
                while True:
                    self._dispatch(_decoder.decode(await read_frame(reader)))
            except Exception as error:  # whatever it is, a new connection is the way out
                _log.warning("connection to the cell lost with %d requests: %r", len(self._pending), error)
            finally:
                self._writer = None
                writer.close()
            lost_at = loop.time()
            # A cell that accepts and hangs up at once must not be hammered.
            await asyncio.sleep(pause)

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port, token = await self._locate()
        reader, writer = await asyncio.open_connection(host, port)
        write_frame(writer, token.encode() if isinstance(token, str) else token)
        return reader, writer

    def _send_submission(self, pending: _Pending) -> None:
        pending.lives += 1
        request = pending.request
        pending.wire_id = (
            request.request_id if pending.lives == 1 else f"{request.request_id}~{pending.lives}"
        )
        if pending.lives > 1:
            self.num_resubmitted += 1
            reason = _finish_reason(request, pending.output)
            if reason is not None:
                # Only the news of its end was lost; there is nothing left to generate.
                end = TokenEvent(
                    request_id=request.request_id,
                    position=len(pending.output),
                    tokens=[],
                    finish_reason=reason,
                )
                pending.events.put_nowait(end)
                return
        self._send(msgspec.structs.replace(request, request_id=pending.wire_id, output=pending.output))

    def _send(self, message: ClientMessage) -> None:
        # A write to a dead connection is lost; the reader notices the death and everything is sent again.
        if self._writer is not None:
            write_frame(self._writer, wire.encode(message))

    # -- what the cell says ----------------------------------------------------------------------------

    def _dispatch(self, message: CellMessage) -> None:
        if isinstance(message, TokenBatch):
            for event in message.events:
                pending = self._find(event.request_id)
                if pending is not None:
                    self._accept(pending, event)
        elif isinstance(message, NumCancelled):
            answer = self._tickets.get(message.ticket)
            if answer is not None and not answer.done():
                answer.set_result(message.number)
        else:
            pending = self._find(message.request_id)
            if pending is not None:
                self._refused(pending, message)

    def _refused(self, pending: _Pending, rejected: Rejected) -> None:
        loop = asyncio.get_running_loop()
        pending.refused_at = loop.time() if pending.refused_at is None else pending.refused_at
        waited = loop.time() - pending.refused_at
        if pending.lives > 1 and rejected.code in _PASSING and waited < self._give_up_after_s:
            # It was admitted once; that its cell starts anew, or is flooded by what it had, is not its fault.
            loop.call_later(_REFUSED_PAUSE_S, self._send_again, pending, pending.lives)
        else:
            pending.events.put_nowait(RequestRejected(rejected))

    def _send_again(self, pending: _Pending, life: int) -> None:
        waiting = self._pending.get(pending.request.request_id) is pending
        # A reconnection in between has already begun another life.
        if waiting and self._writer is not None and pending.lives == life:
            self._send_submission(pending)

    def _find(self, wire_id: str) -> _Pending | None:
        pending = self._pending.get(wire_id.partition("~")[0])
        # Of an earlier life, or of a request whose client is gone: no one is waiting for it.
        return pending if pending is not None and pending.wire_id == wire_id else None

    def _accept(self, pending: _Pending, event: TokenEvent) -> None:
        repeated = len(pending.output) - event.position
        if repeated < 0:
            pending.events.put_nowait(
                CellLost(f"tokens {len(pending.output)} to {event.position} never arrived from the cell")
            )
            return
        tokens = event.tokens[repeated:]
        if repeated:
            event = msgspec.structs.replace(
                event,
                position=len(pending.output),
                tokens=tokens,
                logprobs=event.logprobs[repeated:],
                num_accepted=max(0, event.num_accepted - repeated),
            )
        pending.output.extend(tokens)
        if tokens or event.finish_reason is not None:
            pending.events.put_nowait(msgspec.structs.replace(event, request_id=pending.request.request_id))

    def _fail_all(self, reason: str) -> None:
        for pending in self._pending.values():
            pending.events.put_nowait(CellLost(reason))


def _finish_reason(request: Submit, output: list[int]) -> str | None:
    """Why this output is complete, if it is."""
    if output and output[-1] in request.sampling.stop_token_ids:
        return "stop"
    return "length" if len(output) >= request.sampling.max_tokens else None
