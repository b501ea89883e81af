"""One worker of a cell: its processes, the connections to them, and how they are ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cluster.actors import Whereabouts
from cluster.draft_service import DraftService
from cluster.spawning import end, this_node
from cluster.stalls import LOOKS
from cluster.step_client import StepClient

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
#: Name of the target among the workers.
VERIFIER = "verifier"
# How often it is looked whether a worker that loads still lives.
_LOOK_S = 1.0


@dataclass(slots=True)
class Worker:
    """One worker: a drafter's instance, or the target over all its ranks.

    Attributes:
        name: of the instance, or `VERIFIER`.
        actors, connections: per rank, its actor and the connection to it.
        where: per rank, the node and process it runs in; empty while it has none.
        waits_for: why it has none yet, for people; empty if nothing is amiss.
        is_loaded: whether it can be asked for steps; its loss before that is told by the loading itself.
        in_place: a drafter within the cell's own process, without actor and connection.
    """

    name: str
    actors: list[Any] = field(default_factory=list)
    connections: list[StepClient] = field(default_factory=list)
    where: list[Whereabouts] = field(default_factory=list)
    waits_for: str = ""
    is_loaded: bool = False
    in_place: DraftService | None = None

    def loaded(self) -> None:
        """It can be asked for steps. Raises `ConnectionError` if a process of it has died meanwhile."""
        for connection in self.connections:
            if connection.is_lost:
                raise ConnectionError(f"{connection.name} died while it was loaded")
        self.is_loaded = True

    def kill(self) -> None:
        """End its processes, also stopped ones."""
        here = this_node()
        connections = self.connections
        for rank, (node, pid) in enumerate(self.where):
            # Ray asks a process to end, and has it killed when it has not reacted for five seconds. Stopped
            # ones never react. A connection that stands shows that the process id is still its own.
            if node == here and rank < len(connections) and not connections[rank].is_lost:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        self.end()

    def end(self) -> None:
        """End its processes, by Ray: who serves is gone at once, a stopped one five seconds later."""
        for actor in self.actors:
            end(actor)

    async def while_it_lives(self, work: Awaitable[_Result], silent_s: float) -> _Result:
        """The result of work that its processes do, which are killed if one gives no sign of life meanwhile.

        Args:
            work: actor calls; they fail when the processes end.
            silent_s: a process silent for so long is taken for dead.
        """
        task = asyncio.ensure_future(work)
        looks = 0
        try:
            while not (await asyncio.wait((task,), timeout=_LOOK_S))[0]:
                now = time.monotonic()
                silent = [one for one in self.connections if one.signs(now).heard_s >= silent_s]
                looks = looks + 1 if silent else 0
                if looks == LOOKS:
                    _log.error(
                        "%s has given no sign of life for %.0f s while it was loaded; ending it",
                        silent[0].name,
                        silent[0].signs(now).heard_s,
                    )
                    self.kill()
            return task.result()
        finally:
            task.cancel()
