"""Front ends of the fault search: the real bookkeeping of pending requests over connections that break."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.chaos_workers import Texts, require
from cluster.admission import CODES
from cluster.stream_messages import Objective, Rejected, Submit, TokenEvent
from deployments.pending_requests import PASSING, Pending


@dataclass
class Life:
    """A request as the cell knows it, under one id.

    Attributes:
        pending: whose life it is.
        client: the connection that it was submitted over.
        start: tokens it was submitted with.
        position: of the next token.
        has_ended: whether its last event, or a refusal, was sent.
        may_be_cancelled: whether somebody gave it up.
    """

    pending: Pending
    client: str
    start: int
    position: int
    has_ended: bool = False
    may_be_cancelled: bool = False


@dataclass
class Caller:
    """What whoever made the request has been given.

    Attributes:
        submit: the request.
        tokens: all so far.
        ended: why it ended; empty before.
        is_gone: whether nobody waits for it any more.
        defect: code that it must be refused with, if any.
        others: requests that are further choices of the same answer.
    """

    submit: Submit
    tokens: list[int] = field(default_factory=list)
    ended: str = ""
    is_gone: bool = False
    defect: str = ""
    others: tuple[str, ...] = ()


@dataclass
class Connection:
    """One front end's connection, under a name that is used once."""

    name: str
    inbox: deque[TokenEvent | Rejected] = field(default_factory=deque)
    is_slow: bool = False


class Clients:
    """Submits, receives, and checks every event that the core sends.

    Attributes:
        callers: by request id.
        pending: requests whose end has not been seen, by request id.
        lives: by the id on the wire.
        homeless: pending requests that no cell has.
        duplicates: (connection, id) of submissions that must be refused as duplicates.
        given_up: choices whose answer has failed, as another of its choices did; their cell is to be told.
    """

    def __init__(self, texts: Texts, num_clients: int) -> None:
        self.callers: dict[str, Caller] = {}
        self.pending: dict[str, Pending] = {}
        self.lives: dict[str, Life] = {}
        self.homeless: list[Pending] = []
        self.duplicates: list[tuple[str, str]] = []
        self.given_up: list[Pending] = []
        self.max_tokens = 0
        self.num_resubmitted = 0
        self._texts = texts
        self._num_connections = 0
        self.connections = [self._connect() for _ in range(num_clients)]

    def _connect(self) -> Connection:
        self._num_connections += 1
        return Connection(f"client {self._num_connections}")

    def expected(self, submit: Submit) -> list[int]:
        """What the request must return, token for token."""
        most = min(submit.sampling.max_tokens, self.max_tokens - len(submit.prompt))
        output = self._texts.output(submit.prompt, max(0, most))
        for index, token in enumerate(output):
            if token in submit.sampling.stop_token_ids:
                return output[: index + 1]
        return output

    # Out

    def begin(self, submit: Submit, defect: str = "") -> Pending:
        """A caller's new request."""
        self.callers[submit.request_id] = Caller(submit, defect=defect)
        pending = self.pending[submit.request_id] = Pending(submit, [])
        return pending

    def begin_choices(self, choices: Sequence[Submit]) -> list[Pending]:
        """A caller's new request for an answer of several choices; when one fails, so does the answer."""
        begun = [self.begin(submit) for submit in choices]
        names = {submit.request_id for submit in choices}
        for name in names:
            self.callers[name].others = tuple(sorted(names - {name}))
        return begun

    def send(self, pending: Pending, connection: Connection) -> Submit | None:
        """What goes to the cell for the request's next life; None if it turns out to have ended."""
        message = pending.next_life("cell")
        self.num_resubmitted += pending.sent > 1
        self._pass_on(pending)
        if message is None:
            return None
        self.lives[message.request_id] = Life(
            pending, connection.name, len(message.output), len(message.output)
        )
        return message

    # In

    def sent(self, client: str, events: Sequence[TokenEvent], *, is_lost: bool = False) -> None:
        """The core sends these events to a connection; `is_lost` if that is known to be gone."""
        connection = next((one for one in self.connections if one.name == client), None)
        require(connection is not None or is_lost, f"an event for {client}, whose connection is gone")
        for event in events:
            self._check(client, event)
            if connection is not None and not is_lost:
                connection.inbox.append(event)
        if connection is not None and not connection.is_slow:
            self.receive(connection)

    def rejected(self, client: str, rejection: Rejected) -> None:
        """The core refuses a request."""
        require(rejection.code in CODES, f"refused with the undocumented code {rejection.code}")
        require(bool(rejection.message), "refused without a reason")
        if rejection.code in PASSING:
            after = rejection.retry_after_s
            require(after is not None and after > 0.0, f"{rejection.code} does not say when to come back")
        if rejection.code == "duplicate_id":
            require((client, rejection.request_id) in self.duplicates, "refused as a duplicate")
            self.duplicates.remove((client, rejection.request_id))
            return
        life = self.lives[rejection.request_id]
        caller = self.callers[life.pending.request.request_id]
        require(not life.has_ended, f"{rejection.request_id} was refused after its end")
        begun = life.position > life.start and rejection.code != "draining"
        require(not begun, f"{rejection.request_id} was refused after it was begun")
        if rejection.code not in PASSING and life.pending.request.objective == Objective():
            require(rejection.code == caller.defect, f"{rejection.code} for a request without that defect")
        life.has_ended = True
        connection = next((one for one in self.connections if one.name == client), None)
        if connection is not None:
            connection.inbox.append(rejection)
            if not connection.is_slow:
                self.receive(connection)

    def _check(self, client: str, event: TokenEvent) -> None:
        name = event.request_id
        require(name in self.lives, f"an event of {name}, which was never accepted")
        life = self.lives[name]
        submit = life.pending.request
        require(not life.has_ended, f"an event of {name} after its end")
        require(life.client == client, f"an event of {name} for another front end")
        require(
            event.position == life.position,
            f"{name}: an event at position {event.position}, where {life.position} follows",
        )
        require(bool(event.tokens or event.finish_reason), f"an event of {name} that says nothing")
        life.position += len(event.tokens)
        right = self.expected(submit)
        given = right[event.position : life.position]
        require(event.tokens == given, f"{name}: {event.tokens} at {event.position} instead of {given}")
        if event.finish_reason is None:
            return
        life.has_ended = True
        require(event.receipt is not None, f"{name} ended without a receipt")
        if event.finish_reason == "cancelled":
            require(life.may_be_cancelled, f"{name} was cancelled by nobody")
            return
        require(life.position == len(right), f"{name} ended after {life.position} of {len(right)} tokens")
        stopped = bool(right) and right[-1] in submit.sampling.stop_token_ids
        reason = "stop" if stopped else "length"
        require(event.finish_reason == reason, f"{name} ended by {event.finish_reason}, not {reason}")
        if event.receipt is not None:
            require(event.receipt.num_output_tokens == len(right), f"the receipt of {name} miscounts")

    def receive(self, connection: Connection) -> None:
        """The front end reads all that has come over the connection."""
        while connection.inbox:
            message = connection.inbox.popleft()
            pending = self.lives[message.request_id].pending
            if pending.wire_id != message.request_id or pending.request.request_id not in self.pending:
                continue  # of an earlier life, or nobody waits for it
            if isinstance(message, TokenEvent):
                pending.accept(message)
                self._pass_on(pending)
                continue
            pending.refused(message)
            caller = self.callers[pending.request.request_id]
            pending.is_promised |= message.code == "draining"
            if message.code in PASSING and pending.is_promised and not caller.is_gone:
                self.homeless.append(pending)
            else:
                self._end(pending, message.code)

    def _pass_on(self, pending: Pending) -> None:
        """The caller takes what there is for it."""
        caller = self.callers[pending.request.request_id]
        while not pending.events.empty():
            event = pending.events.get_nowait()
            if isinstance(event, Exception):
                raise event
            require(not caller.ended, f"{pending.request.request_id} was given more after its end")
            require(event.position == len(caller.tokens), "tokens lost or repeated on the way to the caller")
            caller.tokens += event.tokens
            if event.finish_reason is not None:
                self._end(pending, event.finish_reason)

    def _end(self, pending: Pending, reason: str) -> None:
        caller = self.callers[pending.request.request_id]
        require(not caller.ended, f"{pending.request.request_id} ended twice")
        caller.ended = reason
        self.pending.pop(pending.request.request_id, None)
        if reason not in ("stop", "length"):
            for name in caller.others:
                self._give_up(name)

    def _give_up(self, name: str) -> None:
        """Nobody waits for a choice any more."""
        pending = self.pending.pop(name, None)
        if pending is None:
            return
        self.callers[name].is_gone, self.callers[name].ended = True, "gone"
        if pending.cell:
            self.lives[pending.wire_id].may_be_cancelled = True
            self.given_up.append(pending)

    # Losses

    def broken(self, connection: Connection, *, for_good: bool) -> None:
        """A connection is gone, with all that was on its way; the front end connects anew or is gone, too."""
        connection.inbox.clear()
        self.connections[self.connections.index(connection)] = self._connect()
        for life in self.lives.values():
            if life.client == connection.name and not life.has_ended:
                life.may_be_cancelled = True
        for pending in list(self.pending.values()):
            life_now = self.lives.get(pending.wire_id)
            if life_now is None or life_now.client != connection.name:
                continue
            if pending.request.request_id not in self.pending:
                continue  # a choice of an answer that has just failed
            pending.lost()
            if for_good:
                self.callers[pending.request.request_id].is_gone = True
                self._end(pending, "gone")
            else:
                self.homeless.append(pending)

    def cell_lost(self) -> None:
        """The cell died: whatever it had sent and is not read yet is lost as well."""
        for connection in list(self.connections):
            self.broken(connection, for_good=False)
        for life in self.lives.values():
            life.has_ended = True

    def check_ends(self) -> None:
        """Every request has ended, once, with all of the right tokens unless it was given up or refused."""
        for name, caller in self.callers.items():
            require(bool(caller.ended), f"{name} was lost")
            right = self.expected(caller.submit)
            if caller.ended in ("stop", "length"):
                require(caller.tokens == right, f"{name} returned another text")
            else:
                require(caller.tokens == right[: len(caller.tokens)], f"{name} began another text")
            if caller.defect:
                passing = caller.ended in PASSING or caller.ended in (caller.defect, "gone", "cancelled")
                require(passing, f"{name} has the defect {caller.defect} and ended by {caller.ended}")
        require(not self.pending, "requests are pending")
        require(not self.duplicates, "a duplicate was not refused")
