"""How long a front end that is removed goes on with the streams it has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.members import SILENT_S, Member

_POLL_S = 0.1


class Hearing(Protocol):
    """What a front end hears of the other members."""

    @property
    def members(self) -> Sequence[Member]:
        """Everybody, as last heard."""

    @property
    def heard_at(self) -> float:
        """When that was, by `time.monotonic`."""


async def streams_end(
    are_open: Callable[[], bool], cell_stays: Callable[[], bool], *, least_s: float, most_s: float
) -> None:
    """Wait until no stream is open, or none is to be waited for any longer.

    The clients of a front end that goes cannot follow their streams to another, so it stays for them while
    there are cells to end them. Where all cells go, too, the whole system stops, and its time is theirs.

    Args:
        are_open: whether there are streams.
        cell_stays: whether a cell serves that stays, or one starts (`a_cell_stays`).
        least_s: how long streams may go on in any case.
        most_s: how long while a cell stays.
    """
    began = time.monotonic()
    while are_open() and (passed := time.monotonic() - began) < most_s:
        if passed >= least_s and not cell_stays():
            return
        await asyncio.sleep(_POLL_S)


def a_cell_stays(hearing: Hearing, can_serve: Callable[[], bool]) -> bool:
    """Whether a cell serves that stays, or one starts.

    While the directory is away nobody hears of that. It is not always the end of all: a rollout replaces it
    too, for many seconds on a busy machine, and the connections to cells go on meanwhile.

    Args:
        hearing: what the directory last said.
        can_serve: whether there is a connection to a cell that took requests when it was last heard of.
    """
    if time.monotonic() - hearing.heard_at >= SILENT_S:
        return can_serve()
    return any(one.kind == "cell" and one.state != "draining" for one in hearing.members)
