"""When a cell that comes counts as there, and a front end that comes takes requests from clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from cluster.members import UNHEARD_S, Member
from deployments.leaving import Hearing

_POLL_S = 0.1


async def cells_serve(hearing: Hearing, own_id: str, target: str) -> None:
    """Wait until a cell of the target serves, if others serve another one.

    Ray Serve stops those when this front end counts as there. Their cells are of no use to it, and its own
    may have models to load, or wait for resources for ever.

    Args:
        hearing: what the directory last said.
        own_id: of the front end.
        target: whose cells it keeps to (`cluster.served_target`).
    """
    unheard_until: float | None = None
    while True:
        ready = [one for one in hearing.members if one.state == "ready" and one.id != own_id]
        if target in _targets(ready):
            return
        if hearing.members:  # else nobody knows
            unheard_until = unheard_until or time.monotonic() + UNHEARD_S
            others_serve = bool(_targets(ready)) and any(one.kind == "front_end" for one in ready)
            if not others_serve and time.monotonic() >= unheard_until:
                return
        await asyncio.sleep(_POLL_S)


class OthersServing:
    """Whether other cells serve, as a cell that comes hears of it; Ray Serve stops one when it is there.

    Who is not named is not gone. A new directory has not heard of all, and on a machine with much to do a
    cell that serves may report nothing for longer than it is named. Believed gone too early, it was stopped
    for a cell that had no model yet, or could never load one.

    Args:
        hearing: what the directory last said.
        own_id: of the cell.
        gone_after_s: cells that served are taken for gone when none has been named for so long.
    """

    def __init__(self, hearing: Hearing, own_id: str, gone_after_s: float) -> None:
        self._hearing, self._own_id, self._gone_after_s = hearing, own_id, gone_after_s
        self._believed_until: float | None = None
        self._were_named = False

    def __bool__(self) -> bool:
        now, members = time.monotonic(), self._hearing.members
        if any(one.kind == "cell" and one.id != self._own_id and one.state == "ready" for one in members):
            self._believed_until, self._were_named = now + self._gone_after_s, True
        elif members and self._believed_until is None:
            self._believed_until = now + UNHEARD_S
        return self._believed_until is None or now < self._believed_until

    @property
    def are_unheard(self) -> bool:
        """Whether nobody knows yet if there are any."""
        return bool(self) and not self._were_named


def _targets(members: Sequence[Member]) -> set[str | None]:
    return {member.details.get("target") for member in members if member.kind == "cell"}
