"""Who belongs to a running system: its cells and front ends, as they report themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

#: A member reports this often, and is taken for gone once it has been silent for so long. Seconds.
REPORT_INTERVAL_S = 0.25
SILENT_S = 5.0

#: A directory that was replaced may not have heard of all when it first answers; after so long it has.
UNHEARD_S = 3.0

State = Literal["starting", "ready", "draining"]


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the system.

    Attributes:
        kind: "cell" or "front_end".
        id: distinct among all members, another after every restart.
        node: address of the machine it runs on.
        endpoint: host, port and secret at which a cell takes front ends; None for others.
        metrics_url: where its Prometheus metrics are read; empty if it serves none.
        stats: numbers by name; those of a cell are listed in `cluster.cell_stats`.
        state: "ready" takes requests; "draining" ends what it has and takes none.
        details: short texts for people, such as the stage of a start.
    """

    kind: Literal["cell", "front_end"]
    id: str
    node: str
    endpoint: tuple[str, int, str] | None = None
    metrics_url: str = ""
    stats: dict[str, float] = {}
    state: State = "ready"
    details: dict[str, str] = {}


#: Tells the directory how a member is.
Report = Callable[[Member], Awaitable[None]]


class MemberList:
    """Members by when they were last heard of; time is whatever the caller passes, in seconds."""

    def __init__(self, silent_s: float = SILENT_S) -> None:
        self._silent_s = silent_s
        self._heard: dict[str, tuple[float, Member]] = {}

    def report(self, member: Member, now: float) -> None:
        """The member is as it says."""
        self._heard[member.id] = now, member

    def leave(self, member_id: str) -> None:
        """The member is gone, and says so or was seen to end."""
        self._heard.pop(member_id, None)

    def members(self, now: float) -> list[Member]:
        """Those heard of lately, by kind and id."""
        for member_id, (heard_at, _) in list(self._heard.items()):
            if now - heard_at > self._silent_s:
                del self._heard[member_id]
        return sorted((member for _, member in self._heard.values()), key=lambda m: (m.kind, m.id))
