"""The cell: starts one scheduler with its workers, and answers who asks for its state or changes it."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from typing import Any

import msgspec
from pydantic import TypeAdapter
from ray.util import get_node_ip_address

from cluster.baseline import Baseline
from cluster.cell_metrics import CellMetrics
from cluster.chunk_size import chunk_tokens
from cluster.client_server import ClientServer
from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import CostModel, CostProfile
from cluster.drafter_config import DrafterConfig
from cluster.events import CellDraining, DrafterReady, Tick, VerifierReady
from cluster.free_cores import settle_draft_ahead
from cluster.lifecycle import Lifecycle, cause
from cluster.members import State
from cluster.pool_changes import PoolChanges
from cluster.pool_scaling import PoolScaling
from cluster.recorded_core import newest_decisions
from cluster.scheduler_shell import SchedulerShell
from cluster.served_target import served_adapters, served_path, system_fingerprint
from cluster.takeover import Takeover
from cluster.worker_health import WorkerHealth
from cluster.worker_set import WorkerSet
from engine.importing import settle

_log = logging.getLogger(__name__)

TICK_S = 0.25
# Who adds a drafter waits so long for it to be ready; it goes on loading after that.
ADD_WAIT_S = 60.0


class Cell:
    """One scheduler, one target over its ranks, one pool of drafters (a Ray Serve deployment).

    Construction returns at once; `describe` tells how far the start has come.

    Args:
        config: all of it.
        system: if named, workers outlive the cell, and it takes over those of another (`cluster.takeover`).
        name: of the cell, in the lines that its workers log.
    """

    def __init__(self, config: FlotillaConfig, system: str = "", name: str = "") -> None:
        self.config = settle_draft_ahead(config, os.cpu_count() or 1)
        # What reads files is not for every `describe`, in the scheduler's loop.
        self._served = {
            "path": served_path(config.target.path),
            "adapters": served_adapters(config.target),
            "fingerprint": system_fingerprint(config.target),
        }
        self._token = secrets.token_hex(16).encode()
        self._stage = "starting"
        self._failure = ""
        self._is_draining = False
        self._metrics = CellMetrics(lambda: self._lifecycle.kinds)
        self._metrics.configured(self.config, self.served_name)
        call_later = asyncio.get_running_loop().call_later
        shell = SchedulerShell(self.config, self._metrics, self._lost, self._drained, call_later)
        self._shell = shell
        self._clients = ClientServer(self._token, shell.told, shell.left, self.config.health.heartbeat_s)
        self._address: tuple[str, int] = ("", 0)
        self._workers = WorkerSet(self.config, self._token, shell, Takeover(system, config), name)
        shell.connect(self._workers, self._clients)
        self._lifecycle = Lifecycle(self.config, self._workers, shell)
        self._health = WorkerHealth(self.config, self._workers, self._lifecycle, shell, self._metrics.set)
        self._changes = PoolChanges(self.config, self._lifecycle, self._workers, shell)
        self._scaling = PoolScaling(self.config, self._lifecycle, self._changes, shell)
        self._ticking: asyncio.Task[None] | None = None
        self._starting = asyncio.get_running_loop().create_task(self._start())

    # What Serve and the front ends call

    async def endpoint(self) -> tuple[str, int, str]:
        """Address and secret of the front ends' port; waits until it is open."""
        while not self._address[1]:
            await asyncio.sleep(0.02)
        return self._address[0], self._address[1], self._token.decode()

    async def describe(self) -> dict[str, Any]:
        """Model, limits, drafters, policy and how far the start has come."""
        profile = self.core.cost.profile
        scheduler = self.config.scheduler
        chunk = chunk_tokens(scheduler, profile.target)
        return {
            "model": self.served_name,
            **self._served,
            "max_tokens": self.core.max_model_tokens,
            "max_requests": self.config.scaling.cells.max * (scheduler.max_running + scheduler.max_waiting),
            "default_max_tokens": self.config.target.default_max_tokens,
            "vocab_size": self._lifecycle.target.vocab_size,
            "drafters": sorted(self.core.pool.drafters),
            "drafters_configured": self._lifecycle.names,
            "policy": self.config.policy.name,
            "stage": self._stage,
            "failure": self._failure,
            "ready": self._stage == "ready" and self.core.verifier is not None,
            "making_standby": self._lifecycle.making_standby,
            "profile": msgspec.to_builtins(profile),
            "baseline": msgspec.to_builtins(Baseline.of(profile, chunk)),
        }

    async def metrics(self) -> str:
        """Prometheus exposition text of this cell."""
        return self._metrics.render(self.core, self._shell.scheduler_s)

    async def decisions(self, limit: int) -> bytes | None:
        """The newest steps as JSON lines (docs/decisions-log.md); None while none are kept."""
        # In a thread, here and below: encoding takes up to seconds, in which nobody would get a token.
        return await asyncio.to_thread(newest_decisions, self.core, limit)

    async def timeline(self) -> bytes | None:
        """Who worked when, as a trace for Perfetto (trace event format); None while none is kept."""
        timeline = self._shell.timeline
        return None if timeline is None else await asyncio.to_thread(timeline.trace)

    async def stats(self) -> dict[str, float]:
        """Processor seconds spent scheduling and seconds of whole iterations, for the scheduler's share."""
        return self._shell.stats()

    async def set_policy(
        self,
        policy: dict[str, Any],
        scheduler: dict[str, Any] | None = None,
        selector: dict[str, Any] | None = None,
    ) -> None:
        """Change fields of policy, scheduler and selector between requests (to compare on one warm cell).

        Settings used before go on with what they had learnt of costs and drafters.

        Raises:
            ValueError: for a policy or a field that does not exist.
            RuntimeError: while a request is being served, or the target is not there.
        """
        raw = self.config.model_dump()
        raw["drafters"] = [drafter.model_dump() for drafter in self._lifecycle.kinds.values()]
        raw["policy"] |= policy
        raw["scheduler"] |= scheduler or {}
        raw["selector"] |= selector or {}
        config = FlotillaConfig.model_validate(raw)
        core = self.core
        while core.is_idle and core.pool.is_waiting:
            await asyncio.sleep(0.01)  # a drafter is being scored on a request that has ended
        self._shell.change(self.config, config)
        self.config = config
        self._metrics.configured(config, self.served_name)

    # The pool of drafters; names may be those of instances or, for all of them, of kinds

    async def drafters(self) -> list[dict[str, Any]]:
        """State of every instance, as of `Lifecycle.drafters`."""
        return self._lifecycle.drafters()

    async def add_drafter(
        self, config: dict[str, Any], wait_s: float = ADD_WAIT_S, *, replace: bool = False
    ) -> list[dict[str, Any]]:
        """Add or replace one, as configured; its instances, loaded if that took less. Raises `PoolError`."""
        change = self._changes.replace if replace else self._changes.add
        return await change(TypeAdapter(DrafterConfig).validate_python(config), wait_s)

    async def scale_drafter(
        self, kind: str, replicas: int, wait_s: float = ADD_WAIT_S
    ) -> list[dict[str, Any]]:
        """Have so many instances of a kind; those too many are drained. Raises `PoolError`."""
        return await self._changes.scale(kind, replicas, wait_s)

    async def drain_drafter(self, name: str) -> list[dict[str, Any]]:
        """Give it no more requests, and remove it once it has none. Raises `UnknownDrafter`."""
        return await self._changes.drain(name)

    async def remove_drafter(self, name: str) -> None:
        """Remove it now; its requests go on without it. Raises `UnknownDrafter`."""
        await self._changes.remove(name)

    async def check_health(self) -> None:
        """Raise if the cell cannot recover by itself."""
        if self._failure:
            raise RuntimeError(self._failure)
        self._health.check(time.monotonic())

    async def workers(self) -> list[dict[str, Any]]:
        """How every worker is, as of `WorkerHealth.report`."""
        return self._health.report(time.monotonic())

    async def drain(self, within_s: float) -> None:
        """Take no more requests, give back those that wait, and after `within_s` those that still run."""
        if not self._is_draining:
            self._is_draining = True
            self._shell.handle(CellDraining())
        deadline = time.monotonic() + within_s
        while self.core.requests and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._shell.handle(CellDraining(with_running=True))

    @property
    def state(self) -> State:
        """Whether it takes requests."""
        serves = self._stage == "ready" and self.core.verifier is not None
        return "draining" if self._is_draining else "ready" if serves else "starting"

    @property
    def address(self) -> tuple[str, int, str] | None:
        """What `endpoint` says, once the port is open."""
        return (*self._address, self._token.decode()) if self._address[1] else None

    def load(self) -> dict[str, float]:
        """Its load in numbers, as of `CellStats`."""
        return self._shell.load()

    @property
    def served_name(self) -> str:
        """Model id in the API."""
        return self.config.target.model_id

    async def _start(self) -> None:
        try:
            self._enter("looking for workers of a cell that is gone")
            taken = await self._lifecycle.take_over()
            profile, ready = taken or await self._make_workers()
            self._shell.restart(self.config, CostModel(profile))
            for event in ready:
                self._lifecycle.ready(event)
            settle()
            self._enter("ready")
            if taken:  # till now front ends let requests wait, which a cell that starts would refuse
                self._address = await self._clients.start(get_node_ip_address())
            self._ticking = asyncio.get_running_loop().create_task(self._tick())
            self._ticking.add_done_callback(self._ticked)
        except Exception as error:
            _log.exception("the cell could not start")
            self._failure = f"the cell could not start while {self._stage}: {cause(error)}"

    async def _make_workers(self) -> tuple[CostProfile, list[DrafterReady | VerifierReady]]:
        """Make all workers; front ends connect meanwhile."""
        self._address = await self._clients.start(get_node_ip_address())
        await self._lifecycle.reserve(self._enter)
        self._enter("loading the target")
        target = await self._lifecycle.load_first_target()
        self._enter("loading drafters")
        drafters = await self._lifecycle.load_drafters()
        self._enter("measuring costs")
        return await self._lifecycle.measure(), [target, *drafters]

    def _enter(self, stage: str) -> None:
        self._stage = stage

    @property
    def core(self) -> SchedulerCore:
        """The scheduler that serves now."""
        return self._shell.core

    def _lost(self, name: str) -> None:
        self._lifecycle.lost(name)

    def _drained(self, name: str) -> None:
        self._changes.drained(name)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for drift in self.core.cost.take_drifts():
                _log.warning("%s", drift)
            if not self.core.is_idle:
                self._shell.handle(Tick())
            self._lifecycle.leave_record()
            self._health.look(time.monotonic())
            self._workers.cores.look(time.monotonic())
            self._scaling.look(time.monotonic())

    def _ticked(self, ticking: asyncio.Task[None]) -> None:
        """Nobody is left who would time drafts out or replace who stalls: that is for another cell."""
        if not ticking.cancelled() and (error := ticking.exception()) is not None:
            _log.error("the cell no longer looks after its workers", exc_info=error)
            self._failure = f"the cell no longer looks after its workers: {cause(error)}"

    def __del__(self) -> None:
        if (workers := getattr(self, "_workers", None)) is not None:
            workers.kill_all()
