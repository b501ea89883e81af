"""Drafters added, scaled, drained and removed while the cell serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

from cluster.added_costs import estimated_cost
from cluster.config import FlotillaConfig
from cluster.drafter_config import DrafterConfig
from cluster.events import DrafterDraining, DrafterReady, WorkerLost
from cluster.lifecycle import Life, Lifecycle, Shell, cause, waits
from cluster.pool_errors import DrafterFailed, NotServing, PoolError, UnknownDrafter
from cluster.profile_file import ProfileError, load_profile
from cluster.worker_set import WorkerSet

_log = logging.getLogger(__name__)


class PoolChanges:
    """Changes the drafters of a cell that serves.

    Args:
        config: the cell, as it started.
        lifecycle: who keeps its workers alive.
        workers: their actors.
        shell: the scheduler's shell.
    """

    def __init__(
        self, config: FlotillaConfig, lifecycle: Lifecycle, workers: WorkerSet, shell: Shell
    ) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._workers = workers
        self._shell = shell
        self._replacing: set[str] = set()
        # Whose costs are known, so that another drafter under an old name is not taken for it.
        self._learnt = {
            drafter.name: drafter.model_copy(update={"replicas": 1}) for drafter in config.drafters
        }

    async def add(self, config: DrafterConfig, wait_s: float) -> list[dict[str, Any]]:
        """Add a kind of drafter with its instances, and wait up to `wait_s` for them.

        Raises:
            PoolError: if the name is taken, the drafter cannot be loaded, is taken away meanwhile, or is of a
                class that the configuration of the start does not name.
        """
        self._require_serving()
        self._require_known_code(config)
        if config.name in self._lifecycle.kinds:
            raise PoolError(f"there is a drafter `{config.name}` already; scale it, or remove it first")
        self._lifecycle.kinds[config.name] = config
        # Instances of a kind that was given up may still be draining under its name.
        names = self._lifecycle.free_names(config.name, config.replicas)
        return self._still_there(config.name, await self._add(config, names, wait_s))

    async def scale(self, kind: str, replicas: int, wait_s: float) -> list[dict[str, Any]]:
        """Have so many instances of a kind: more are added as by `add`, those too many are drained.

        Those go first that do not serve, then the newest.

        Raises:
            UnknownDrafter, PoolError: as its name says, or if the new instances cannot be loaded, or are
                taken away meanwhile.
        """
        self._require_serving()
        config = self._lifecycle.kinds.get(kind)
        if config is None:
            raise UnknownDrafter(self._unknown(kind))
        if replicas < 1:
            raise PoolError("a drafter has at least one instance; remove it to have none")
        if kind in self._replacing:  # those too many would be the new ones
            raise PoolError(f"drafter `{kind}` is being replaced; scale it once that is done")
        there = [life for life in self._lifecycle.of_kind(kind) if life.state != "draining"]
        self._lifecycle.kinds[kind] = config.model_copy(update={"replicas": replicas})
        if replicas > len(there):
            names = self._lifecycle.free_names(kind, replicas - len(there))
            return self._still_there(kind, await self._add(config, names, wait_s))
        # Who serves stays, and of those the oldest.
        for life in sorted(there, key=lambda life: life.state != "ready")[replicas:]:
            self._drain(life)
        return [info for info in self._lifecycle.drafters() if info["kind"] == kind]

    async def replace(self, config: DrafterConfig, wait_s: float) -> list[dict[str, Any]]:
        """Serve a kind with other weights or settings: once its new instances are loaded, the old ones drain.

        Waits up to `wait_s` for that; it goes on afterwards. If they cannot be loaded, the old ones stay.

        Raises:
            UnknownDrafter, PoolError: as its name says, if it is of another kind, or cannot be loaded.
        """
        self._require_serving()
        self._require_known_code(config)
        before = self._lifecycle.kinds.get(config.name)
        if before is None:
            raise UnknownDrafter(self._unknown(config.name))
        if before.kind != config.kind:
            raise PoolError(
                f"drafter `{config.name}` is of the kind `{before.kind}` and cannot become one of "
                f"`{config.kind}`; add that under another name, then remove this one"
            )
        if config.runs_beside_target:
            raise PoolError(f"drafter `{config.name}` runs in the target's process: it comes with a new cell")
        if config.name in self._replacing:
            raise PoolError(f"drafter `{config.name}` is being replaced already; wait until that is done")
        self._replacing.add(config.name)
        task = self._lifecycle.spawn(self._replace(config, before))
        task.add_done_callback(lambda _: self._replacing.discard(config.name))
        done, _ = await asyncio.wait([task], timeout=wait_s)
        if done:
            task.result()
        return [info for info in self._lifecycle.drafters() if info["kind"] == config.name]

    async def drain(self, name: str) -> list[dict[str, Any]]:
        """Give an instance, or all of a kind, no further requests, and remove it once it has none.

        Raises:
            UnknownDrafter: if nobody is called that.
        """
        lives = self._named(name)
        for life in lives:
            self._drain(life)
        return [info for info in self._lifecycle.drafters() if info["name"] in {life.name for life in lives}]

    async def remove(self, name: str) -> None:
        """End an instance, or all of a kind, now; its requests go on without it in the same step.

        Raises:
            UnknownDrafter: if nobody is called that.
        """
        for life in self._named(name):
            self._shell.handle(WorkerLost(life.name))
            await self._lifecycle.forget(life)

    def drained(self, name: str) -> None:
        """The scheduler has nothing more on a draining instance."""
        life = self._lifecycle.lives[name]
        self._shell.handle(WorkerLost(name))
        self._lifecycle.spawn(self._lifecycle.forget(life))

    # Parts

    async def _replace(self, config: DrafterConfig, before: DrafterConfig) -> None:
        kind = config.name
        old = self._lifecycle.of_kind(kind)
        names = self._lifecycle.free_names(kind, config.replicas)
        self._lifecycle.kinds[kind] = config
        try:
            await self._add(config, names, None)
            ready = [life.name for life in self._lifecycle.of_kind(kind) if life.state == "ready"]
            gone = [name for name in names if name not in ready]
            if gone:
                raise PoolError(
                    f"drafter `{kind}` was not replaced: {', '.join(gone)} was taken away meanwhile"
                )
        except BaseException:
            there = self._lifecycle.of_kind(kind)
            if any(life in old for life in there):
                self._lifecycle.kinds[kind] = before
            for life in there:
                if life not in old:  # some of several were loaded
                    self._drain(life)
            raise
        for life in old:
            self._drain(life)

    async def _add(
        self, config: DrafterConfig, names: list[str], wait_s: float | None
    ) -> list[dict[str, Any]]:
        lives = [Life(name, config) for name in names]
        for life in lives:
            self._lifecycle.lives[life.name] = life
            life.task = self._lifecycle.spawn(self._load_added(life))
        tasks = [life.task for life in lives if life.task is not None]
        done, _ = await asyncio.wait(tasks, timeout=wait_s)
        failed = [task.exception() for task in done if not task.cancelled() and task.exception() is not None]
        if failed:
            all_or_some = "" if len(failed) == len(names) else f"{len(failed)} of {len(names)} instances of "
            raise DrafterFailed(
                f"{all_or_some}drafter `{config.name}` could not be added: {cause(failed[0])}"
            )
        return [info for info in self._lifecycle.drafters() if info["name"] in names]

    @staticmethod
    def _still_there(kind: str, instances: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What was added, unless nothing of it is left to tell of."""
        if not instances:
            raise PoolError(f"drafter `{kind}` was not added: it was taken away while it was loaded")
        return instances

    async def _load_added(self, life: Life) -> None:
        assert life.config is not None
        try:
            await self._workers.reserve_added(life.name, life.config, lambda text: waits(life, text))
            life.waits_for = ""
            ready = await self._workers.load_drafter(life.name, life.config, self._lifecycle.target)
            life.costs = await self._learn_cost(life, ready)
            if life.lost_at:
                raise ConnectionError("its process ended while it was loaded")
        except asyncio.CancelledError:
            raise
        except BaseException:
            life.task = None
            await self._lifecycle.forget(life)
            raise
        life.state = "ready"
        _log.warning("drafter %s was added; its costs: %s", life.name, life.costs)
        self._shell.handle(ready)
        self._workers.standby.fill()

    async def _learn_cost(self, life: Life, ready: DrafterReady) -> str:
        """Costs of a kind not seen before: from the file, measured if the cell is idle, else estimated."""
        config, core = life.config, self._shell.core
        assert config is not None
        same = config.model_copy(update={"replicas": 1})
        if self._learnt.get(config.name) == same and config.name in core.cost.profile.drafters:
            costs = (other.costs for other in self._lifecycle.of_kind(config.name) if other.costs)
            return next(costs, "as before")
        self._learnt[config.name] = same
        try:
            return await self._find_cost(life.name, config, ready)
        except BaseException:  # else another attempt would take what the drafter before cost for its own
            self._learnt.pop(config.name, None)
            raise

    async def _find_cost(self, name: str, config: DrafterConfig, ready: DrafterReady) -> str:
        core = self._shell.core
        if self._config.profile is not None:
            alone = self._config.model_copy(update={"drafters": (config,)})
            with contextlib.suppress(ProfileError):
                profile, _ = await asyncio.to_thread(load_profile, Path(self._config.profile), alone)
                self._shell.learn_cost(config.name, profile.drafters[config.name])
                return "profile file"
        if core.is_idle:
            steps = core.totals.steps
            cost = await self._workers.measure_drafter(name)
            if self._shell.core is core and core.is_idle and core.totals.steps == steps:
                self._shell.learn_cost(config.name, cost)
                return "measured"
        profile = core.cost.profile
        known = {
            drafter.kind: (drafter.size, profile.drafters[drafter.kind])
            for drafter in core.pool.drafters.values()
            if drafter.kind in profile.drafters
        }
        size = ready.capabilities.num_parameters
        self._shell.learn_cost(config.name, estimated_cost(size, known, profile.target))
        return "estimated, corrected as it drafts"

    def _drain(self, life: Life) -> None:
        if life.state == "ready":
            life.state = "draining"
            self._shell.handle(DrafterDraining(life.name))
        elif life.state != "draining":  # it serves nobody yet
            if life.task is not None:
                life.task.cancel()  # at once: else it may be ready by the time that it is forgotten
            self._shell.handle(WorkerLost(life.name))
            self._lifecycle.spawn(self._lifecycle.forget(life))

    def _named(self, name: str) -> list[Life]:
        """All instances of a kind, also where the first of them has its name and is `KIND/0` then; or one."""
        self._require_serving()
        lives = self._lifecycle.of_kind(name)
        if lives:
            return lives
        kind, _, number = name.rpartition("/")
        life = self._lifecycle.lives.get(name) or (self._lifecycle.lives.get(kind) if number == "0" else None)
        if life is None or life.config is None:
            raise UnknownDrafter(self._unknown(name))
        return [life]

    def _unknown(self, name: str) -> str:
        life = self._lifecycle.lives.get(name)
        if life is not None and life.config is not None and life.config.name in self._lifecycle.kinds:
            return f"`{name}` is an instance; name its kind, `{life.config.name}`"
        return f"there is no drafter `{name}`; there are {', '.join(self._lifecycle.names) or 'none'}"

    def _require_serving(self) -> None:
        if self._lifecycle.target.num_slots == 0 or any(life.state == "loading" for life in self._at_start()):
            raise NotServing("the cell is still starting; its drafters can be changed once it serves")

    def _require_known_code(self, config: DrafterConfig) -> None:
        """Who may change drafters is not to choose what is run as the server's user."""
        known = [one.import_path for one in self._config.drafters if one.kind == "own"]
        if config.kind == "own" and config.import_path not in known:
            raise PoolError(
                f"`import_path: {config.import_path}` is not one of the configuration that the cell started "
                "with: classes of yours are named there"
            )

    def _at_start(self) -> list[Life]:
        """Those that the start itself loads."""
        return [
            life for life in self._lifecycle.lives.values() if life.task is None and life.state == "loading"
        ]
