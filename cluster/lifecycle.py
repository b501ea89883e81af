"""The lives of a cell's workers: start, loss, replacement, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import DEFAULT_PROFILE, CostProfile
from cluster.drafter_config import DrafterConfig
from cluster.events import DrafterReady, Event, VerifierReady, WorkerLost
from cluster.linear_cost import LinearCost
from cluster.placement import free_names, instance_names
from cluster.profile_file import load_profile
from cluster.takeover import Instance
from cluster.worker import VERIFIER
from cluster.worker_set import WorkerSet
from engine.error_text import text_of

_log = logging.getLogger(__name__)

# Pause before a lost worker is made again; doubled up to the last while it keeps dying.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 10.0

State = Literal["loading", "ready", "draining", "restarting"]


class Shell(Protocol):
    """What of the cell its workers' lives need."""

    @property
    def core(self) -> SchedulerCore:
        """The scheduler; another one after a change of policy."""

    def handle(self, event: Event) -> None:
        """Tell the scheduler."""

    def restarted(self, name: str) -> None:
        """A worker is made again."""

    def learn_cost(self, kind: str, cost: LinearCost) -> None:
        """What draft forwards of a kind that was not there before cost."""


class UnloadableDrafter(Exception):
    """A configured drafter could not be loaded; the message names it and says why."""


@dataclass(slots=True)
class Life:
    """How a worker fares.

    Attributes:
        name: of the worker.
        config: of its kind; None for the target.
        state: where in its life it is.
        restarts: how often it was replaced.
        costs: where those of its kind come from.
        lost_at: when it was lost, while it is being replaced.
        recovery_s: from the last loss until it was ready again.
        waits_for: resources that are not there yet, for people.
        task: what loads it now.
    """

    name: str
    config: DrafterConfig | None
    state: State = "loading"
    restarts: int = 0
    costs: str = ""
    lost_at: float = 0.0
    recovery_s: float | None = None
    waits_for: str = ""
    task: asyncio.Task[None] | None = None


class Lifecycle:
    """Starts the workers of a cell, and replaces those that are lost.

    Args:
        config: the cell, as it starts.
        workers: their actors.
        shell: the scheduler's shell.
    """

    def __init__(self, config: FlotillaConfig, workers: WorkerSet, shell: Shell) -> None:
        self._config = config
        self._workers = workers
        self._shell = shell
        self._target = VerifierReady(0, 0, 0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: list[Life] = []  # forgotten, and their processes not ended yet
        self._noted: object = None
        self.kinds: dict[str, DrafterConfig] = {drafter.name: drafter for drafter in config.drafters}
        self.lives: dict[str, Life] = {}
        for kind, drafter in self.kinds.items():
            for name in instance_names(kind, drafter.replicas):
                self.lives[name] = Life(name, drafter)
        self.lives[VERIFIER] = Life(VERIFIER, None)

    @property
    def target(self) -> VerifierReady:
        """Limits of the target; zeros until it was loaded."""
        return self._target

    @property
    def names(self) -> list[str]:
        """Kinds and instances, as requests may choose them."""
        return list(dict.fromkeys([*self.kinds, *(life.name for life in self._drafters())]))

    def drafters(self) -> list[dict[str, Any]]:
        """Every instance: state, load, restarts, where it runs, and what it waits for if it does not."""
        pool = self._shell.core.pool.drafters
        found = []
        for life in self._drafters():
            worker, seen = self._workers.workers.get(life.name), pool.get(life.name)
            node, pid = worker.where[0] if worker is not None and worker.where else ("", 0)
            assert life.config is not None
            found.append(
                {
                    "name": life.name,
                    "kind": life.config.name,
                    "state": life.state,
                    "load": len(seen.served) if seen is not None else 0,
                    "max_requests": life.config.max_requests,
                    "restarts": life.restarts,
                    "recovery_s": life.recovery_s,
                    "node": node,
                    "pid": pid,
                    "costs": life.costs,
                    "waits_for": life.waits_for or (worker.waits_for if worker is not None else ""),
                }
            )
        return found

    # Start

    async def reserve(self, report: Callable[[str], None]) -> None:
        """Wait for the resources of all; `report` is told what is missing."""
        drafters = {life.name: life.config for life in self._drafters() if life.config is not None}
        await self._workers.reserve(drafters, report)

    async def load_first_target(self) -> VerifierReady:
        """As `load_target`; the configured drafters' processes start at the same time."""
        self._target = await self._workers.load_target(meanwhile=self._begin_drafters)
        return self._target

    def _begin_drafters(self) -> None:
        for life in self._drafters():
            if life.config is not None:
                self._workers.begin_drafter(life.name, life.config)

    async def load_target(self) -> VerifierReady:
        """Make the target's workers."""
        self._target = await self._workers.load_target()
        return self._target

    async def load_drafters(self) -> list[DrafterReady]:
        """Make all configured instances.

        Raises:
            UnloadableDrafter: if one of them cannot be.
        """
        return list(
            await asyncio.gather(
                *(
                    self._load_configured(life.name, life.config)
                    for life in self._drafters()
                    if life.config is not None
                )
            )
        )

    async def _load_configured(self, name: str, config: DrafterConfig) -> DrafterReady:
        try:
            return await self._workers.load_drafter(name, config, self._target)
        except Exception as error:
            # Whatever it was, it ends the start: who wrote several drafters must know which one it is of.
            told = cause(error)
            named = told if told.startswith("drafter `") else f"drafter `{name}`: {told}"
            raise UnloadableDrafter(named) from error

    async def measure(self) -> CostProfile:
        """Costs of target and drafters: from the configured file, else measured now, an instance per kind."""
        if self._config.profile is not None:
            path = Path(self._config.profile)
            profile, warnings = await asyncio.to_thread(load_profile, path, self._config)
            for warning in warnings:
                _log.warning("%s", warning)
            self._note_costs("profile file")
            return profile
        target = await self._workers.measure_target()
        drafters = {}
        for kind in self.kinds:  # one after the other: measured beside nobody else
            name = next(life.name for life in self.of_kind(kind))
            drafters[kind] = await self._workers.measure_drafter(name)
        self._note_costs("measured")
        return CostProfile(target=target, drafters=drafters, overhead_s=DEFAULT_PROFILE.overhead_s)

    def ready(self, event: DrafterReady | VerifierReady) -> None:
        """A worker that was loaded at the start serves from now on."""
        life = self.lives[event.name if isinstance(event, DrafterReady) else VERIFIER]
        if life.state == "loading":  # else it was lost since, and is being made anew
            life.state = "ready"
            self._shell.handle(event)
        self._workers.standby.fill()

    @property
    def making_standby(self) -> bool:
        """Whether a process in reserve is being made now."""
        return self._workers.standby.is_filling

    # Another cell

    def leave_record(self) -> None:
        """Tell the workers what another cell must know of them, if that has changed."""
        target = self._workers.workers.get(VERIFIER)
        if target is None or not target.is_loaded:
            return
        lives = [life for life in self._drafters() if life.state in ("ready", "restarting")]
        profile = self._shell.core.cost.profile
        noted = (
            [(life.name, life.state, life.restarts) for life in (*lives, self.lives[VERIFIER])],
            list(self.kinds.items()),
            profile,
            self._workers.standby.ready,
        )
        if noted != self._noted:
            self._noted = noted
            self._workers.leave([self._instance(life) for life in lives], dict(self.kinds), profile)

    def _instance(self, life: Life) -> Instance:
        worker = self._workers.workers.get(life.name)
        actors = worker.actors if worker is not None and worker.is_loaded else []
        assert life.config is not None
        return Instance(life.name, life.config, actors[0] if actors else None, life.costs)

    async def take_over(self) -> tuple[CostProfile, list[DrafterReady | VerifierReady]] | None:
        """Take over the workers of a cell that is gone: its costs, and who is ready; None if there are none.

        Drafters that the other cell had and that do not answer are made anew, beside.
        """
        taken = await self._workers.take_over()
        if taken is None:
            return None
        self._target = taken.target
        self.kinds = dict(taken.record.kinds)
        drafters = {one.name: Life(one.name, one.config, costs=one.costs) for one in taken.record.instances}
        self.lives = {**drafters, VERIFIER: Life(VERIFIER, None)}
        answered = {event.name for event in taken.drafters}
        for life in drafters.values():
            if life.name not in answered:
                life.state, life.lost_at = "restarting", time.monotonic()
                life.task = self.spawn(self._replace(life))
        _log.warning(
            "the target of a cell that is gone was taken over, and %d of its %d drafters",
            len(answered),
            len(drafters),
        )
        return taken.record.profile, [taken.target, *taken.drafters]

    # Losses

    def lost(self, name: str) -> None:
        """A worker's connection ended: its requests move on now, and somebody takes its place."""
        life = self.lives.get(name)
        if life is None or life.state == "restarting":
            return
        if life.state == "loading" and life.task is not None:
            life.lost_at = time.monotonic()  # seen by who loads it
            return
        if name == VERIFIER:
            self._noted = None
            self._workers.leave_nothing()
        was_draining = life.state == "draining"
        life.state, life.lost_at = "restarting", time.monotonic()
        self._shell.handle(WorkerLost(name))
        if was_draining:
            self.spawn(self.forget(life))
        else:
            life.task = self.spawn(self._replace(life))

    async def _replace(self, life: Life) -> None:
        pause = FIRST_PAUSE_S
        while True:
            life.restarts += 1
            self._shell.restarted(life.name)
            try:
                await self._workers.stop(life.name)
                await self._workers.restore(life.name, lambda text: waits(life, text))
                life.waits_for = ""
                ready: DrafterReady | VerifierReady
                if life.config is None:
                    ready = await self.load_target()
                else:
                    ready = await self._workers.load_drafter(life.name, life.config, self._target)
                self._workers.workers[life.name].loaded()  # else its loss was told while nobody heard
            except Exception:
                # Ray, the network or the model: whatever it was may pass, and requests wait meanwhile.
                _log.exception("%s could not be restarted; trying again in %.1f s", life.name, pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LAST_PAUSE_S)
            else:
                life.state, life.recovery_s = "ready", time.monotonic() - life.lost_at
                _log.warning("%s is ready again %.2f s after its loss", life.name, life.recovery_s)
                self._shell.handle(ready)
                self._workers.standby.fill()
                return

    # Parts

    async def forget(self, life: Life) -> None:
        """The instance is gone for good."""
        if self.lives.get(life.name) is not life:
            return
        del self.lives[life.name]
        self._leaving.append(life)
        assert life.config is not None
        kind = life.config.name
        left = [other for other in self.of_kind(kind) if other.state != "draining"]
        if left:
            self.kinds[kind] = self.kinds[kind].model_copy(update={"replicas": len(left)})
        else:
            self.kinds.pop(kind, None)
        try:
            if life.task is not None:
                life.task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):  # told to whoever asked for it
                    await life.task
            await self._workers.remove(life.name)
        finally:
            self._leaving = [other for other in self._leaving if other is not life]

    def _drafters(self) -> list[Life]:
        return [life for life in self.lives.values() if life.config is not None]

    def of_kind(self, kind: str) -> list[Life]:
        """Instances of a kind, in the order they were made."""
        return [life for life in self._drafters() if life.config is not None and life.config.name == kind]

    def has_room(self, config: DrafterConfig) -> bool:
        """Whether what one more instance reserves is free."""
        return self._workers.has_room(config.placement)

    def free_names(self, kind: str, count: int) -> list[str]:
        """Names for `count` more instances of a kind, which nobody has until its process has ended.

        Workers and the scheduler are told of instances by name: the end of one must not be another's.
        """
        taken = [
            life.name
            for life in (*self._drafters(), *self._leaving)
            if life.config is not None and life.config.name == kind
        ]
        return free_names(kind, taken, count)

    def _note_costs(self, source: str) -> None:
        for life in self._drafters():
            life.costs = source

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it beside; what it raises is logged."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a change of the workers failed: %s", cause(error))


def waits(life: Life, text: str) -> None:
    """Note what its resources are waited for."""
    life.waits_for = text


def cause(error: BaseException | None) -> str:
    """What a worker said, without Ray's account of the way it took."""
    told = getattr(error, "cause", None) or error
    return repr(told) if told is None else text_of(told)
