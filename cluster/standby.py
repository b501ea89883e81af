"""Processes in reserve: torch is imported and no model loaded, so that a lost drafter is soon replaced.

Nearly all of a model drafter's start is Python importing torch. A process that has done so loads a small
model in well under a second. It reserves nothing, so it stands in only where Ray reserves nothing that a
process must be given: drafters with GPUs, custom resources or a node of their own start as always.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.actors import DrafterWorker, Whereabouts
from cluster.drafter_config import DrafterConfig
from cluster.spawning import spawn
from cluster.takeover import ReserveProcess, Takeover

_log = logging.getLogger(__name__)

# A process in reserve that does not say where it is within so long is not relied on.
ANSWER_S = 1.0


class Standby:
    """Processes in reserve for drafters of one cell.

    Args:
        wanted: how many are kept.
        takeover: how a drafter that comes of one outlives the cell.
    """

    def __init__(self, wanted: int, takeover: Takeover) -> None:
        self._wanted = wanted
        self._takeover = takeover
        self._ready: list[ReserveProcess] = []
        self._coming: Any = None
        self._node = ""
        self._filling: asyncio.Task[None] | None = None

    @property
    def actors(self) -> list[Any]:
        """All that are there or being made."""
        return [process.actor for process in self._ready] + ([self._coming] if self._coming else [])

    @property
    def ready(self) -> tuple[ReserveProcess, ...]:
        """Those that could stand in now, for the cell that takes over."""
        return tuple(self._ready)

    def take_over(self, ready: Sequence[ReserveProcess]) -> None:
        """Another cell's are this one's; whether they live is seen when one is taken."""
        self._ready.extend(ready)

    @property
    def is_filling(self) -> bool:
        """Whether a process is being made, which takes seconds of a core: a bad moment to measure."""
        return self._filling is not None and not self._filling.done()

    def beside(self, config: DrafterConfig, where: Whereabouts) -> None:
        """Processes are made on this drafter's node from now on, if it is one they can stand in for."""
        if can_stand_in(config):
            self._node = where[0]

    async def take(self, config: DrafterConfig, node: str) -> Any:
        """A living process for this drafter, which is the caller's from now on; None without one.

        Args:
            config: of the drafter.
            node: id of the node it must run on; any if empty.
        """
        while can_stand_in(config):
            fitting = [process for process in self._ready if node in ("", process.node)]
            if not fitting:
                break
            self._ready.remove(fitting[0])
            with contextlib.suppress(Exception):  # dead, or its node is
                await asyncio.wait_for(_answer(fitting[0].actor.where.remote()), ANSWER_S)
                return fitting[0].actor
            _kill(fitting[0].actor)
        return None

    def fill(self) -> None:
        """Have as many as wanted again, in time that nobody else uses; returns at once."""
        if self._node and (self._filling is None or self._filling.done()):
            self._filling = asyncio.get_running_loop().create_task(self._fill())

    def kill(self) -> None:
        """End all, when the cell ends."""
        self._wanted = 0
        for actor in self.actors:
            _kill(actor)
        self._ready.clear()

    async def _fill(self) -> None:
        while len(self._ready) < self._wanted:
            beside = NodeAffinitySchedulingStrategy(self._node, soft=True)
            options = {"num_cpus": 0, "scheduling_strategy": beside, **self._takeover.options("standby")}
            self._coming = actor = spawn(DrafterWorker, options, self._takeover.orphan_s)
            try:
                node, _ = await _answer(actor.prepare.remote())
            except Exception as error:
                # Nobody is without a drafter for it; the next that is taken is a reason to try again.
                _log.warning("no process could be made in reserve: %s", error)
                _kill(actor)
                return
            finally:
                self._coming = None
            if len(self._ready) < self._wanted:
                self._ready.append(ReserveProcess(actor, node))
            else:
                _kill(actor)


def can_stand_in(config: DrafterConfig) -> bool:
    """Whether a process that reserves nothing can become this drafter, and is worth keeping for it."""
    placement = config.placement
    reserves_none = not placement.num_gpus and not placement.resources
    return config.kind == "model" and reserves_none and placement.collocate != "own-node"


async def _answer(ref: Any) -> Whereabouts:
    where: Whereabouts = await ref
    return where


def _kill(actor: Any) -> None:
    with contextlib.suppress(Exception):  # dead already, or Ray itself is going
        ray.kill(actor)
