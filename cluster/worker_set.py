"""The workers of a cell: makes their actors, connects to them, notices their loss, and stops them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from ray.exceptions import RayError

from cluster.actors import DrafterWorker, VerifierWorker, Whereabouts
from cluster.config import FlotillaConfig
from cluster.core_keeping import CoreKeeping
from cluster.cost_model import CostProfile
from cluster.draft_service import DraftService
from cluster.drafter_config import BesideTargetConfig, DrafterConfig
from cluster.events import DrafterReady, VerifierReady
from cluster.linear_cost import LinearCost
from cluster.placement import plan_added, plan_cell, rank_name
from cluster.placement_config import ResourcesConfig
from cluster.placing import placing
from cluster.pool_drafter import build_pool_drafter
from cluster.profile_fit import fit_cost_of
from cluster.rank import Rank
from cluster.reservation import Reservations
from cluster.spawning import end, spawn
from cluster.standby import Standby
from cluster.step_client import StepClient
from cluster.takeover import CellRecord, Instance, TakenOver, Takeover, claim
from cluster.worker import VERIFIER, Worker
from drafters.messages import DraftCall, DraftResult
from engine.heads_config import UnsuitableHeads
from engine.wire import encode

_log = logging.getLogger(__name__)

POLL_S = 0.1


class Listener(Protocol):
    """Who hears what workers say."""

    def drafted(self, name: str, data: bytes) -> None:
        """A drafter answered."""

    def verified(self, rank: int, data: bytes) -> None:
        """A rank of the target answered."""

    def lost(self, name: str) -> None:
        """A worker died; told once for all ranks of the target."""


class WorkerSet:
    """Actors and connections by worker name.

    Args:
        config: the cell.
        token: secret that admits to the workers' ports.
        listener: hears answers and losses.
        takeover: whether and how they outlive the cell.
        cell: its id in the lines they log; none if empty.
    """

    def __init__(
        self, config: FlotillaConfig, token: bytes, listener: Listener, takeover: Takeover, cell: str = ""
    ) -> None:
        self._config = config
        self._cell = cell
        self._token = token
        self._listener = listener
        self._takeover = takeover
        self._reservations = Reservations(self._takeover.group_options)
        self.standby = Standby(config.pool.standby, self._takeover)
        self.cores = CoreKeeping(config)
        self._accompanying: asyncio.Task[None] | None = None
        self.workers: dict[str, Worker] = {}
        self._begun: dict[str, Any] = {}  # actors of drafters that are not loaded yet

    # Resources

    async def reserve(self, drafters: dict[str, DrafterConfig], report: Callable[[str], None]) -> None:
        """Reserve what the target and these instances need, whole; `report` is told what is waited for."""
        target = self._config.target
        placements = {rank_name(rank): target.placement for rank in range(target.tensor_parallel)}
        await self._reservations.reserve(
            plan_cell(self._config),
            {**placements, **{name: drafter.placement for name, drafter in drafters.items()}},
            report,
        )

    async def reserve_added(self, name: str, config: DrafterConfig, report: Callable[[str], None]) -> None:
        """Reserve for one more instance: a seat that another left, or a group of its own."""
        if self._reservations.reuse(name, config.placement):
            return
        while not (target := self._where(VERIFIER)):
            await asyncio.sleep(POLL_S)  # it is being replaced: nobody knows yet where it will be
        plan = plan_added(name, config, target[0][0], self._nodes())
        await self._reservations.reserve(plan, {name: config.placement}, report, is_alone=True)

    def has_room(self, placement: ResourcesConfig) -> bool:
        """As of `Reservations`."""
        return self._reservations.has_room(placement)

    async def restore(self, name: str, report: Callable[[str], None]) -> None:
        """Wait until there is a place for a lost worker; `report` is told what is waited for."""
        num_ranks = self._config.target.tensor_parallel
        for one in map(rank_name, range(num_ranks)) if name == VERIFIER else [name]:
            await self._reservations.restore(one, self._nodes(), report)

    # Workers come and go

    async def load_target(self, meanwhile: Callable[[], None] = lambda: None) -> VerifierReady:
        """Make the target's ranks and connect to them; `meanwhile` is called once their processes start."""
        target = self._config.target
        worker = self.workers[VERIFIER] = Worker(VERIFIER)
        names = [rank_name(rank) for rank in range(target.tensor_parallel)]
        worker.actors = [self._spawn(VerifierWorker, name, target.placement) for name in names]
        meanwhile()
        self._accompany()
        async with placing(worker, names, self._reservations):
            await self._connect(worker, names, self._hearing(VERIFIER, len(names)))
            ready: VerifierReady = await self._watched(worker, self._load_ranks(worker))
        await self.cores.settle(worker, self.workers)
        worker.loaded()
        return ready

    def begin_drafter(self, name: str, config: DrafterConfig) -> None:
        """Make a model drafter's process, which imports meanwhile; `load_drafter` goes on with it."""
        if config.kind == "model":
            actor = self._spawn(DrafterWorker, name, config.placement)
            actor.import_models.remote()
            self._begun[name] = actor

    async def load_drafter(self, name: str, config: DrafterConfig, target: VerifierReady) -> DrafterReady:
        """Make one instance of a drafter and connect to it; one without work of its own is made here."""
        worker = self.workers[name] = Worker(name)
        if isinstance(config, BesideTargetConfig):
            path, running = self._config.target.path, self._config.target.heads
            if config.path != running:
                raise UnsuitableHeads(
                    f"beside the target runs {running or 'nothing'}, not {config.path}: what drafts there is "
                    "loaded with the target, so a cell starts with what it is to have"
                )
            drafter = build_pool_drafter(config, target.vocab_size, target.max_tokens, path)
            worker.in_place = DraftService(drafter)
            return DrafterReady(name, drafter.capabilities, config.max_requests, kind=config.name)
        actor = self._begun.pop(name, None)
        if actor is None:
            actor = await self.standby.take(config, await self._reservations.node_of(name))
            if actor is not None:
                _log.info("a process in reserve becomes %s", name)
        if actor is None:
            actor = self._spawn(DrafterWorker, name, config.placement)
        worker.actors.append(actor)
        async with placing(worker, [name], self._reservations):
            await self._connect(worker, [name], self._hearing(name, 1))
            loading = worker.actors[0].load.remote(
                config, target.vocab_size, target.max_tokens, self._config.target.path
            )
            capabilities = await self._watched(worker, loading)
        await self.cores.settle(worker, self.workers)
        worker.loaded()
        self.standby.beside(config, worker.where[0])
        return DrafterReady(name, capabilities, config.max_requests, kind=config.name)

    # Workers outlive the cell

    @property
    def lineage(self) -> str:
        """Under which name resources are reserved, by this cell and those before and after it."""
        return self._takeover.lineage

    def leave(self, instances: list[Instance], kinds: dict[str, DrafterConfig], profile: CostProfile) -> None:
        """Have the workers wait for another cell if this one dies, and note what that must know."""
        ranks, seats = self.workers[VERIFIER].actors, self._reservations.seats
        record = CellRecord(ranks, instances, kinds, profile, self.lineage, seats, self.standby.ready)
        for worker in self.workers.values():
            for rank, actor in enumerate(worker.actors if worker.is_loaded else ()):
                actor.keep.remote(record if worker.name == VERIFIER and rank == 0 else None)

    def leave_nothing(self) -> None:
        """Have the workers end with this cell: without a target another would load all of them anew."""
        for worker in self.workers.values():
            for actor in worker.actors:
                actor.keep.remote(is_kept=False)

    async def take_over(self) -> TakenOver | None:
        """Take over the workers of a cell that is gone; None without any whose target answers.

        Raises `ConnectionError` if that dies meanwhile.
        """
        for first in await self._takeover.waiting(rank_name(0)):
            # Silent, it may be busy with another cell that is taking it over.
            if (taken := await claim(first, is_left=False)) is None:
                continue
            target, record = taken
            others = await asyncio.gather(*(claim(rank, is_left=True) for rank in record.ranks[1:]))
            if None in others:  # it is of no use in parts
                for rank, answer in zip(record.ranks, [taken, *others], strict=True):
                    if answer is not None:
                        end(rank)
                continue
            self._takeover.lineage = record.lineage
            self._reservations.take_over(record.seats)
            self.standby.take_over(record.reserve)
            await self._join(VERIFIER, [rank_name(rank) for rank in range(len(record.ranks))], record.ranks)
            drafters = await asyncio.gather(*map(self._take_over_drafter, record.instances))
            self._accompany()
            self.workers[VERIFIER].loaded()
            living = [one for one in drafters if one is not None and self._lives(one)]
            return TakenOver(target, record, living)
        return None

    def _lives(self, taken: DrafterReady) -> bool:
        """Whether it can be asked for steps. Before all are taken over, nobody would be told of its loss."""
        try:
            self.workers[taken.name].loaded()
        except ConnectionError as error:
            _log.warning("%s", error)
            return False
        return True

    async def _take_over_drafter(self, instance: Instance) -> DrafterReady | None:
        taken = None if instance.actor is None else await claim(instance.actor, is_left=True)
        if taken is None:
            return None
        try:
            worker = await self._join(instance.name, [instance.name], [instance.actor])
        except (OSError, RayError) as error:
            _log.warning("%s has died since it was taken over: %r", instance.name, error)
            await self.stop(instance.name)
            return None
        self.standby.beside(instance.config, worker.where[0])
        config = instance.config
        return DrafterReady(instance.name, taken[0], config.max_requests, kind=config.name)

    async def _join(self, name: str, names: list[str], actors: list[Any]) -> Worker:
        """Connect to processes that have a model; their loss is told once all are taken over."""
        worker = self.workers[name] = Worker(name, actors=list(actors))
        async with placing(worker, names, self._reservations):
            await self._connect(worker, names, self._hearing(name, len(names)))
        await self.cores.settle(worker, self.workers)
        return worker

    def _spawn(self, kind: type[Any], name: str, placement: ResourcesConfig) -> Any:
        options = {**self._reservations.options(name, placement), **self._takeover.options(name)}
        return spawn(kind, options, self._takeover.orphan_s)

    def _accompany(self) -> None:
        if self._takeover.orphan_s is not None and self._accompanying is None:
            self._accompanying = asyncio.create_task(self._sign(self._takeover.orphan_s / 4))

    async def _sign(self, every_s: float) -> None:
        """Give signs of life to processes that nobody is connected to yet: they end without a cell."""
        while True:
            await asyncio.sleep(every_s)
            for actor in [*self._begun.values(), *self.standby.actors]:
                actor.where.remote()

    # Costs

    async def measure_target(self) -> LinearCost:
        """What verify forwards cost; every rank computes, the first is believed."""
        target = self.workers[VERIFIER]
        forwards = asyncio.gather(*(actor.profile.remote() for actor in target.actors))
        first = (await self._watched(target, forwards))[0]
        return fit_cost_of("the target", first.points, first.expert_share)

    async def measure_drafter(self, name: str) -> LinearCost:
        """What draft forwards of one instance cost, which must be asked nothing else meanwhile."""
        worker = self.workers[name]
        if worker.actors:
            measured = await self._watched(worker, worker.actors[0].profile.remote())
            return fit_cost_of(f"drafter `{name}`", measured)
        # Made here: what it costs is evaluating the target's heads.
        target = self.workers[VERIFIER]
        points = asyncio.gather(*(rank.profile_heads.remote() for rank in target.actors))
        return fit_cost_of(f"drafter `{name}`", (await self._watched(target, points))[0])

    async def stop(self, name: str) -> None:
        """Close the connections and end the processes; what is reserved stays reserved."""
        if (worker := self.workers.get(name)) is not None:
            worker.kill()
        await self._leave(name)

    async def remove(self, name: str) -> None:
        """As `stop`, for good."""
        if (worker := self.workers.get(name)) is not None:
            # Killed like a stopped one, it would be a worker that died of too little memory to Ray, which
            # says so at length on the terminal of who removed it.
            worker.end()
        await self._leave(name)
        self._reservations.vacate(name)

    async def _leave(self, name: str) -> None:
        if (begun := self._begun.pop(name, None)) is not None:
            end(begun)
        worker = self.workers.pop(name, None)
        for client in () if worker is None else worker.connections:
            await client.close()

    def kill_target(self) -> None:
        """End the target's processes; their loss is noticed as any other."""
        self.workers[VERIFIER].kill()

    def kill_all(self) -> None:
        """End every process, when the cell itself ends."""
        self.standby.kill()
        for actor in self._begun.values():
            end(actor)
        for worker in self.workers.values():
            worker.is_loaded = False  # else its loss is heard yet, and another is made that nobody ends
            worker.kill()
        self._reservations.release()

    # Steps

    def send_draft(self, name: str, call: DraftCall) -> DraftResult | None:
        """Queue a call for a drafter, or have it answered by one within this process.

        For one that is being replaced it is lost, as the scheduler knows.
        """
        worker = self.workers.get(name)
        if worker is not None and worker.in_place is not None:
            return worker.in_place.draft(call)
        if worker is not None and worker.connections:
            worker.connections[0].send(encode(call))
        return None

    def send_verify(self, call: bytes) -> None:
        """Queue a call for every rank of the target."""
        for rank in self.workers[VERIFIER].connections:
            rank.send(call)

    # Parts

    def _where(self, name: str) -> list[Whereabouts]:
        worker = self.workers.get(name)
        return [] if worker is None else worker.where

    def _nodes(self) -> list[str]:
        """Ids of the nodes that workers of the cell run on."""
        return [node for name in self.workers for node, _ in self._where(name)]

    async def _connect(self, worker: Worker, names: list[str], heard: list[Callable[[bytes], None]]) -> None:
        """Connect to its processes, which give signs of life from now on; by rank, names and who hears."""
        heartbeat_s, busy = self._config.health.heartbeat_s, self._config.is_busy_polling
        log, cell = self._config.log, {"cell": self._cell} if self._cell else {}
        addresses = await asyncio.gather(
            *(
                actor.open.remote(self._token, heartbeat_s, log, {**cell, "worker": name}, busy_polling=busy)
                for name, actor in zip(names, worker.actors, strict=True)
            )
        )

        def told() -> None:
            if worker.is_loaded:  # before, who loads it is told
                self._listener.lost(worker.name)

        lost = _once(told)
        for name, address, hear in zip(names, addresses, heard, strict=True):
            client = await StepClient.connect(
                name, tuple(address), self._token, hear, lost, busy_polling=busy
            )
            worker.connections.append(client)

    async def _load_ranks(self, worker: Worker) -> VerifierReady:
        host, port = await worker.actors[0].rendezvous.remote()
        loading = [
            actor.load.remote(self._config.target, Rank(rank, len(worker.actors), host, port))
            for rank, actor in enumerate(worker.actors)
        ]
        ready: VerifierReady = (await asyncio.gather(*loading))[0]
        return ready

    async def _watched(self, worker: Worker, work: Awaitable[Any]) -> Any:
        return await worker.while_it_lives(work, self._config.health.loading_silent_s)

    def _hearing(self, name: str, num_ranks: int) -> list[Callable[[bytes], None]]:
        """By rank, who hears what a worker answers."""
        if name != VERIFIER:
            return [lambda data: self._listener.drafted(name, data)]
        return [partial(self._listener.verified, rank) for rank in range(num_ranks)]


def _once(callback: Callable[[], None]) -> Callable[[], None]:
    """Ranks fall together: the first loss reported is the only one acted on."""
    done = False

    def call() -> None:
        nonlocal done
        if not done:
            done = True
            callback()

    return call
