"""When a front end that comes begins to take requests from clients."""

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


def _targets(members: Sequence[Member]) -> set[str | None]:
    return {member.details.get("target") for member in members if member.kind == "cell"}
