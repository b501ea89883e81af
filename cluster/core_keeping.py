"""Who of a cell keeps to which processor cores, on machines with fewer cores than processes."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from cluster.config import FlotillaConfig
from cluster.core_affinity import KeptThread, usable_cores
from cluster.spawning import this_node
from cluster.worker import VERIFIER, Worker

# After so many steps sent ahead more may follow, and after so many in turn those may: to change cores costs
# some 50 microseconds.
IN_A_ROW = 2


class CoreKeeping:
    """Ranks of the target keep to a core each, the scheduler to that of the first, drafters to the others.

    The scheduler and the target work by turns. Drafters also work while these do (ahead, and reading), and
    without this, would have to be moved out of their way each time (docs/decisions/0044). While steps are
    sent ahead, scheduler and target work at the same time, and drafters hardly ever: then the scheduler runs
    on whatever core is idle.
    """

    def __init__(self, config: FlotillaConfig) -> None:
        """Of the cell whose thread this is; `pool.core_affinity` says whether anybody keeps to anything."""
        self._is_on = config.pool.core_affinity
        self._num_drafters = sum(
            drafter.replicas for drafter in config.drafters if not drafter.runs_beside_target
        )
        self._usable = usable_cores()
        self._claimed: dict[str, list[int]] = {}
        self._scheduler: KeptThread | None = None
        self._num_ahead = self._num_in_turn = 0

    def drafted(self) -> None:
        """A drafter was asked for drafts: the target waits for the scheduler, and then works."""
        self._num_ahead = self._num_in_turn = 0
        if self._scheduler is not None:
            self._scheduler.free(False)

    def sent(self, *, is_ahead: bool) -> None:
        """The target was sent its next call, while it works on another or after that was answered."""
        self._num_ahead = self._num_ahead + 1 if is_ahead else 0
        self._num_in_turn = 0 if is_ahead else self._num_in_turn + 1
        if self._scheduler is not None and max(self._num_ahead, self._num_in_turn) >= IN_A_ROW:
            self._scheduler.free(is_ahead)

    def look(self, now: float) -> None:
        """To be called every second or so: the scheduler's core may be busy with something else."""
        if self._scheduler is not None:
            self._scheduler.look(now)

    async def settle(self, loaded: Worker, workers: Mapping[str, Worker]) -> None:
        """One of the `workers` was loaded: the target claims cores, which all others are told."""
        if not self._is_on:
            return
        if loaded is not workers.get(VERIFIER):
            self._settle_drafter(loaded)
            return
        target = loaded
        num_ranks = len(target.actors)
        self._claimed = {}
        first: int | None = None
        for rank, (actor, (node, _)) in enumerate(zip(target.actors, target.where, strict=True)):
            core = await actor.claim_core.remote(num_ranks, self._num_drafters)
            if core is None:
                continue
            self._claimed.setdefault(node, []).append(core)
            if rank == 0 and node == this_node():
                first = core
        cores = self._usable if first is None else {first}
        self._scheduler = KeptThread(threading.get_native_id(), cores, self._usable)
        self._num_ahead = self._num_in_turn = 0
        for worker in workers.values():
            if worker is not target and worker.is_loaded:
                self._settle_drafter(worker)

    def _settle_drafter(self, drafter: Worker) -> None:
        for actor, (node, _) in zip(drafter.actors, drafter.where, strict=True):
            actor.keep_off.remote(self._claimed.get(node, []))
