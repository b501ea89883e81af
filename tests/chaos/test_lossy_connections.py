"""Front ends over connections that break at any moment: every token once, whatever cells do."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.members import Member
from cluster.stream_messages import (
    Cancel,
    CellMessage,
    ClientMessage,
    Rejected,
    Submit,
    TokenBatch,
    TokenEvent,
)
from deployments import cell_clients, pending_requests
from deployments.cell_clients import CellClients
from deployments.cell_router import CellLoad
from deployments.pending_requests import Pending, RequestRejected
from engine.sampling_params import SamplingParams
from tests.examples import examples


class _NoWaiting(selectors.DefaultSelector):
    """Instead of waiting, time passes."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing will ever happen again"
        self.now += timeout
        return super().select(0)


class SimulatedTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on which hours take no time."""

    def __init__(self) -> None:
        self._simulated = _NoWaiting()
        super().__init__(self._simulated)

    def time(self) -> float:
        return self._simulated.now


@dataclass
class LossyCell:
    """A cell that answers a request with its numbers, in steps, and forgets everything when it is lost.

    Attributes:
        running: by the id on the wire, what was submitted and the output so far.
        starts_over: whether it sends again what a resubmission says is there already.
        gives_back: whether it refuses newcomers, as a cell that drains.
        unnoticed: ids of a connection whose loss it has not noticed yet.
    """

    name: str
    state: str = "ready"
    running: dict[str, tuple[Submit, int]] = field(default_factory=dict)
    starts_over: bool = False
    gives_back: bool = False
    connection: LossyConnection | None = None
    unnoticed: set[str] = field(default_factory=set)

    def receive(self, message: ClientMessage) -> None:
        if isinstance(message, Submit):
            assert message.request_id not in self.running.keys() | self.unnoticed, "an id was used twice"
            expected = text(message)
            assert message.output == expected[: len(message.output)], "resubmitted with a wrong output"
            if self.gives_back:
                self._send(Rejected(request_id=message.request_id, code="draining", message="leaving"))
                return
            start = 0 if self.starts_over else len(message.output)
            self.running[message.request_id] = (message, start)
        elif isinstance(message, Cancel):
            found = self.running.pop(message.request_id, None)
            if found is not None:
                self._send_end(message.request_id, found[1], [], "cancelled")

    def step(self, rng: random.Random) -> None:
        """Some tokens for some of the requests, in one message."""
        events = []
        if rng.random() < 0.1:
            self.unnoticed.clear()
        for request_id, (submit, position) in list(self.running.items()):
            if rng.random() < 0.3:
                continue
            tokens = text(submit)[position : position + rng.randint(1, 4)]
            position += len(tokens)
            ends = position == len(text(submit))
            self.running[request_id] = (submit, position)
            if ends:
                del self.running[request_id]
            events.append(
                TokenEvent(
                    request_id=request_id,
                    position=position - len(tokens),
                    tokens=tokens,
                    finish_reason=reason(submit) if ends else None,
                )
            )
        self._send(TokenBatch(events))

    def give_back(self) -> None:
        """It is being removed: those that run go back, too."""
        for request_id in list(self.running):
            del self.running[request_id]
            self._send(Rejected(request_id=request_id, code="draining", message="leaving"))

    def lose(self) -> None:
        """The connection breaks, with what was on its way; in time the cell cancels what came over it."""
        self.unnoticed |= self.running.keys()
        self.running.clear()
        if self.connection is not None:
            self.connection.break_off()

    def _send_end(self, request_id: str, position: int, tokens: list[int], why: str) -> None:
        end = TokenEvent(request_id=request_id, position=position, tokens=tokens, finish_reason=why)
        self._send(TokenBatch([end]))

    def _send(self, message: CellMessage) -> None:
        if self.connection is not None:
            self.connection.inbox.append(message)


class LossyConnection:
    """Stands in for `CellConnection`: messages arrive when the test says so, or never."""

    cells: dict[str, LossyCell]

    def __init__(
        self,
        member: Member,
        on_open: Callable[[LossyConnection], None],
        on_message: Callable[[LossyConnection, CellMessage], None],
        on_lost: Callable[[LossyConnection], None],
        silent_s: float,
    ) -> None:
        self.named(member)
        self.was_open = self.is_open = self.was_silent = False
        self.inbox: deque[CellMessage] = deque()
        self.outbox: deque[ClientMessage] = deque()
        self._on_open, self._on_message, self._on_lost = on_open, on_message, on_lost
        self._opening = asyncio.get_running_loop().call_later(0.01, self._open)

    def named(self, member: Member) -> None:
        self.member, self.missing_since = member, None

    def away_s(self, now: float) -> float:
        return 0.0  # targets are part of their cells here

    def _open(self) -> None:
        cell = self.cells.get(self.member.id)
        if cell is None or cell.connection is not None:
            self._on_lost(self)
            return
        cell.connection = self
        self.is_open = self.was_open = True
        self._on_open(self)

    def send(self, message: ClientMessage) -> None:
        if self.is_open:
            self.outbox.append(message)

    def deliver(self, number: int) -> None:
        """So many messages reach each side."""
        cell = self.cells[self.member.id]
        for _ in range(number):
            if self.outbox:
                cell.receive(self.outbox.popleft())
            if self.inbox and self.is_open:
                self._on_message(self, self.inbox.popleft())

    def break_off(self) -> None:
        self._opening.cancel()
        cell = self.cells.get(self.member.id)
        if cell is not None and cell.connection is self:
            cell.connection = None
        was_open, self.is_open = self.is_open, False
        if was_open:
            self._on_lost(self)

    abort = break_off

    async def close(self) -> None:
        self._on_lost = lambda _: None
        self.break_off()

    def note_sent(self, num_tokens: int, *, is_behind: bool) -> None: ...

    def load(self) -> CellLoad:
        return CellLoad.of(self.member)


class Listing:
    """The directory."""

    poll_s: float | None = 0.05
    are_replaced = False

    def __init__(self, cells: dict[str, LossyCell]) -> None:
        self._cells = cells

    async def cells(self) -> Sequence[Member]:
        return [
            Member(kind="cell", id=name, node="", endpoint=("", 0, ""), state=cell.state, stats={})  # type: ignore[arg-type]
            for name, cell in self._cells.items()
        ]


def text(submit: Submit) -> list[int]:
    """What a request returns: depends on its prompt and the position; ends at a stop token if it has one."""
    tokens = [(submit.prompt[0] * 7 + position * 3) % 23 for position in range(submit.sampling.max_tokens)]
    for index, token in enumerate(tokens):
        if token in submit.sampling.stop_token_ids:
            return tokens[: index + 1]
    return tokens


def reason(submit: Submit) -> str:
    return "stop" if text(submit)[-1] in submit.sampling.stop_token_ids else "length"


async def collect(clients: CellClients, submit: Submit, into: list[TokenEvent]) -> None:
    async for event in clients.submit(submit):
        into.append(event)


STEPS = (
    "step",
    "step",
    "deliver",
    "deliver",
    "pause",
    "submit",
    "lose",
    "drain",
    "add",
    "start over",
    "cancel",
)


async def story(steps: Sequence[tuple[str, int]], seed: int) -> int:
    """Requests over cells to which these things happen; afterwards one sound cell serves what is left.

    Returns how many requests were submitted again.
    """
    rng = random.Random(seed)
    cells: dict[str, LossyCell] = {"cell 0": LossyCell("cell 0")}
    LossyConnection.cells = cells
    clients = CellClients(Listing(cells), give_up_after_s=1e6, silent_s=1e6)
    clients.connect()
    given: dict[str, list[TokenEvent]] = {}
    submits: dict[str, Submit] = {}
    tasks: list[asyncio.Task[None]] = []
    cancelled: set[str] = set()

    def submit(draw: int) -> None:
        number = len(tasks)
        made = Submit(
            request_id=f"r{number}",
            prompt=[draw % 97, 1],
            sampling=SamplingParams(max_tokens=1 + draw % 25, stop_token_ids=(5,) if draw % 3 else ()),
        )
        submits[made.request_id], given[made.request_id] = made, []
        tasks.append(asyncio.create_task(collect(clients, made, given[made.request_id])))

    submit(seed)
    for name, draw in steps:
        cell = cells[sorted(cells)[draw % len(cells)]]
        match name:
            case "step":
                cell.step(rng)
            case "deliver" if cell.connection is not None:
                cell.connection.deliver(1 + draw % 4)
            case "submit":
                submit(draw)
            case "lose":
                cell.lose()
            case "drain":
                cell.gives_back, cell.state = True, "draining"
                if draw % 2:
                    cell.give_back()
            case "add":
                cells[f"cell {len(cells)}"] = LossyCell(f"cell {len(cells)}")
            case "start over":
                cell.starts_over = not cell.starts_over
            case "cancel" if submits:
                chosen = sorted(submits)[draw % len(submits)]
                cancelled.add(chosen)
                clients.cancel(chosen)
        await asyncio.sleep(0.0 if draw % 3 else 0.3)
    cells["last"] = LossyCell("last")
    for _ in range(4000):
        if all(task.done() for task in tasks):
            break
        for cell in cells.values():
            cell.step(rng)
            if cell.connection is not None:
                cell.connection.deliver(8)
        await asyncio.sleep(0.02)
    assert clients.num_streams == 0, "requests are left"
    for request_id, events in given.items():
        check(submits[request_id], events, is_cancelled=request_id in cancelled)
    await asyncio.gather(*tasks)
    await clients.close()
    return clients.num_resubmitted


def check(submit: Submit, events: Sequence[TokenEvent], *, is_cancelled: bool) -> None:
    """The caller has seen every token once and in order, and one end."""
    tokens: list[int] = []
    for event in events:
        assert event.request_id == submit.request_id
        assert event.position == len(tokens), "lost or repeated"
        tokens += event.tokens
    assert [event.finish_reason is not None for event in events] == [False] * (len(events) - 1) + [True]
    expected, why = text(submit), events[-1].finish_reason
    if why == "cancelled":
        assert is_cancelled
        assert tokens == expected[: len(tokens)]
    else:
        assert (tokens, why) == (expected, reason(submit))


def run(main: Coroutine[None, None, int]) -> int:
    with (
        mock.patch.object(cell_clients, "CellConnection", LossyConnection),
        asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner,
    ):
        return runner.run(main)


@examples(300)
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 10_000)), min_size=5, max_size=60),
    seed=st.integers(0, 10_000),
)
def test_every_token_is_given_once_whatever_connections_and_cells_do(
    steps: list[tuple[str, int]], seed: int
) -> None:
    run(story(steps, seed))


def test_stories_have_losses() -> None:
    rng = random.Random(4)
    assert sum(run(story(drawn(rng), number)) for number in range(60)) > 100


def drawn(rng: random.Random) -> list[tuple[str, int]]:
    return [(rng.choice(STEPS), rng.randrange(10_000)) for _ in range(40)]


def _repeats(self: Pending, event: TokenEvent) -> None:
    """Passes everything on, as if positions said nothing."""
    self.output.extend(event.tokens)
    self.events.put_nowait(event)


def _begins_anew(self: Pending, cell: str) -> Submit | None:
    """Forgets what was committed when it submits again."""
    self.output.clear()
    return _next_life(self, cell)


def _keeps_id(self: Pending, cell: str) -> Submit | None:
    """Uses one id for all lives."""
    self.sent = 0
    return _next_life(self, cell)


_next_life = pending_requests.Pending.next_life


@pytest.mark.parametrize(
    ("name", "broken"), [("accept", _repeats), ("next_life", _begins_anew), ("next_life", _keeps_id)]
)
def test_the_property_fails_for_front_ends_that_are_wrong(
    name: str, broken: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pending, name, broken)
    rng = random.Random(1)
    for _ in range(60):
        try:
            run(story(drawn(rng), rng.randrange(1000)))
        except (AssertionError, RequestRejected, pending_requests.CellLost):
            return
    pytest.fail("not noticed")
