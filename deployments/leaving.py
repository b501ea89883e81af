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
    are_open: Callable[[], bool], hearing: Hearing, *, least_s: float, most_s: float
) -> None:
    """Wait until no stream is open, or none is to be waited for any longer.

    The clients of a front end that goes cannot follow their streams to another, so it stays for them while
    there are cells to end them. Where all cells go, too, the whole system stops, and its time is theirs.

    Args:
        are_open: whether there are streams.
        hearing: what the directory last said.
        least_s: how long streams may go on in any case.
        most_s: how long while a cell serves that stays, or starts.
    """
    began = time.monotonic()
    while are_open() and (passed := time.monotonic() - began) < most_s:
        if passed >= least_s and not _a_cell_stays(hearing):
            return
        await asyncio.sleep(_POLL_S)


def _a_cell_stays(hearing: Hearing) -> bool:
    is_news = time.monotonic() - hearing.heard_at < SILENT_S
    return is_news and any(one.kind == "cell" and one.state != "draining" for one in hearing.members)
