"""A front end's side of a request whose end has not been seen: what it has, and what is still to come."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field

import msgspec

from cluster.batching.background import comes_behind
from cluster.stream_messages import Rejected, Resumed, Submit, TokenEvent

#: Rejections that another cell need not share, and that pass by themselves.
PASSING = frozenset({"queue_full", "saturated", "not_ready", "draining"})
#: Those of a cell that serves, and tells when it will have room.
FULL = frozenset({"queue_full", "saturated"})
# Who is refused so much later had been taken, and is given back.
_HELD_S = 1.0
#: Besides those, who was taken by a cell is not turned away for what another one has learnt of its speed.
PASSING_IF_PROMISED = PASSING | {"slo_infeasible"}


class CellLost(Exception):
    """No cell came back in time; the request's outcome is unknown beyond the tokens already seen."""


class RequestRejected(Exception):
    """The cells turned the request away."""

    def __init__(self, rejected: Rejected) -> None:
        super().__init__(rejected.message)
        self.rejected = rejected


@dataclass(eq=False)
class Pending:
    """A request whose end has not been seen.

    Attributes:
        request: as the caller submitted it.
        output: tokens received so far, which a resubmission carries.
        events: to the caller; an exception ends it.
        cell: where it is; empty while it is nowhere.
        wire_id: the id in the life that runs now. Each life has its own, so that a cell that still holds the
            previous one neither refuses the new one nor confuses the two.
        sent: how often it was sent. lives: in how many of those a cell may have worked on it.
        sent_output: output tokens it had when it was last sent.
        is_promised: a cell has taken it, or may have: it is no longer turned away for what passes by itself.
        is_cancelled: the caller wants no more than its receipt.
        is_ended: somebody else had it ended, and no further cell is to have it.
        was_lost: its cell was lost, and it was not sent to one since.
        has_fled: whether it has left a cell whose target was away. It does so once: should its prompt be what
            ends targets, it does not go from cell to cell.
        refused_by: cells that refused it since it was last taken.
        turned_away: of the refusals of those that serve, the one that is over first; it outweighs that of
            one that does not yet.
        refused_at: when cells began to refuse it although it is promised.
        begun: when it came. sent_at: when it was last sent.
        first_token_at, last_token_at: when the first and the latest of its tokens came.
    """

    request: Submit
    output: list[int]
    events: asyncio.Queue[TokenEvent | Exception] = field(default_factory=asyncio.Queue)
    cell: str = ""
    wire_id: str = ""
    sent: int = 0
    lives: int = 0
    sent_output: int = 0
    is_promised: bool = False
    is_cancelled: bool = False
    is_ended: bool = False
    was_lost: bool = False
    has_fled: bool = False
    refused_by: set[str] = field(default_factory=set)
    turned_away: Rejected | None = None
    refused_at: float | None = None
    begun: float = field(default_factory=time.monotonic)
    sent_at: float = -math.inf
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def is_behind(self) -> bool:
        """Whether it is in the background of those with objectives."""
        return comes_behind(self.request)

    def waits_at(self, cell: str, *, is_behind: bool) -> bool:
        """Whether it has had no token yet of this cell, and is in the background or not."""
        return self.cell == cell and not self.output and self.is_behind is is_behind

    def next_life(self, cell: str) -> Submit | None:
        """What to send to `cell`; None if nothing is left to generate, which the caller is told."""
        self.sent += 1
        self.lives += 1
        self.cell, self.sent_output = cell, len(self.output)
        self.sent_at = time.monotonic()
        request = self.request
        self.wire_id = request.request_id if self.sent == 1 else f"{request.request_id}~{self.sent}"
        if self.sent > 1:
            reason = _finish_reason(request, self.output)
            if reason is not None:
                self._tell(reason)  # only the news of its end was lost
                return None
        # Who was admitted once is not refused for an objective because its cell was lost.
        on_miss = "serve" if self.is_promised else request.on_miss
        return msgspec.structs.replace(
            request,
            request_id=self.wire_id,
            output=self.output,
            on_miss=on_miss,
            was_taken=self.is_promised,
            waited_s=0.0 if self.output else round(self.sent_at - self.begun, 3),
            resumed=self._resumed(),
        )

    def _resumed(self) -> Resumed | None:
        """When it had its tokens so far; None if it has none."""
        if self.first_token_at is None or self.last_token_at is None:
            return None
        return Resumed(
            first_token_s=round(self.first_token_at - self.begun, 6),
            last_token_s=round(self.last_token_at - self.begun, 6),
            sent_s=round(self.sent_at - self.begun, 6),
        )

    def refused(self, rejected: Rejected) -> None:
        """The cell did not take it, or gave it back."""
        if time.monotonic() > self.sent_at + _HELD_S:
            self.refused_at = None
        if rejected.code in FULL and _wait_s(rejected) < _wait_s(self.turned_away):
            self.turned_away = rejected
        if len(self.output) == self.sent_output:
            self.lives -= 1  # nobody worked on it, or nothing that the receipt of another life misses
        self.refused_by.add(self.cell)
        self.cell = self.wire_id = ""

    def withdrawn(self) -> None:
        """It leaves a cell in whose queue it was."""
        self.lives -= 1
        self.is_promised = True
        self.refused_at = None
        self.ask_all()
        self.refused_by.add(self.cell)
        self.cell = self.wire_id = ""

    def lost(self) -> None:
        """The connection to its cell ended."""
        self.cell = self.wire_id = ""
        self.is_promised = self.was_lost = True
        self.refused_at = None
        self.ask_all()

    def ask_all(self) -> None:
        """Cells that refused it are asked again."""
        self.refused_by.clear()
        self.turned_away = None

    def end(self) -> None:
        """The caller is told that it was cancelled."""
        self._tell("cancelled")

    def accept(self, event: TokenEvent) -> None:
        """Pass on what is new in an event; tokens that came in an earlier life are dropped by position."""
        repeated = len(self.output) - event.position
        if repeated < 0:
            self.events.put_nowait(
                CellLost(f"tokens {len(self.output)} to {event.position} never arrived from the cell")
            )
            return
        tokens = event.tokens[repeated:]
        if repeated:
            event = msgspec.structs.replace(
                event,
                position=len(self.output),
                tokens=tokens,
                logprobs=event.logprobs[repeated:],
                num_accepted=max(0, event.num_accepted - repeated),
                trace=None,
            )
        self.output.extend(tokens)
        if tokens:
            self.last_token_at = time.monotonic()
            self.first_token_at = self.first_token_at or self.last_token_at
        self.is_promised, self.refused_at = True, None
        if tokens or event.finish_reason is not None:
            self.events.put_nowait(msgspec.structs.replace(event, request_id=self.request.request_id))

    def _tell(self, finish_reason: str) -> None:
        self.events.put_nowait(
            TokenEvent(
                request_id=self.request.request_id,
                position=len(self.output),
                tokens=[],
                finish_reason=finish_reason,
            )
        )


def _wait_s(rejected: Rejected | None) -> float:
    """When it may be tried again, as far as that was told."""
    return math.inf if rejected is None else rejected.retry_after_s or 0.0


def _finish_reason(request: Submit, output: list[int]) -> str | None:
    """Why this output is complete, if it is."""
    if output and output[-1] in request.sampling.stop_token_ids:
        return "stop"
    return "length" if len(output) >= request.sampling.max_tokens else None
