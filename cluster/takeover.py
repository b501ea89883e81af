"""How workers outlive the cell that made them, so that the next cell need not load them again.

A scheduler is a process like any other and may die. Its workers hold what takes long to make: models, and
the KV of shared prefixes. So they are actors of nobody (Ray: detached), who wait a while for another cell of
the same configuration, and what that cell must know lies with the first rank of the target.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from cluster.config import FlotillaConfig
from cluster.cost_model import CostProfile
from cluster.drafter_config import DrafterConfig
from cluster.events import DrafterReady, VerifierReady
from cluster.metric_set import flotilla_version
from cluster.seats import Seats
from cluster.spawning import end

_log = logging.getLogger(__name__)

#: Ray's namespace of all workers.
NAMESPACE = "flotilla-workers"
# One that waits for a cell has nothing else to do than say so. One that is being loaded answers afterwards.
WAITS_S = 2.0
# One of a cell that is gone, asked for something that takes no time, is stopped if it does not answer.
ANSWER_S = 6.0


@dataclass(frozen=True, slots=True)
class Instance:
    """A drafter's instance.

    Attributes:
        name, config: its own.
        actor: None while it has none, or if it needs none.
        costs: where those of its kind come from.
    """

    name: str
    config: DrafterConfig
    actor: Any
    costs: str


@dataclass(frozen=True, slots=True)
class ReserveProcess:
    """A process that could become a drafter (`cluster.standby`): its actor, and the id of its node."""

    actor: Any
    node: str


@dataclass(frozen=True, slots=True)
class CellRecord:
    """What a cell tells the one that takes its workers over.

    Attributes:
        ranks: actors of the target, by rank.
        instances: all drafters there are to be, loaded or not.
        kinds: all drafters as they are configured now, those added and changed at run time included.
        profile: costs of target and drafters.
        lineage: under which their resources are reserved.
        seats: where each of them sits, by name, and places of workers that were removed.
        reserve: processes that stand by.
    """

    ranks: list[Any]
    instances: list[Instance]
    kinds: Mapping[str, DrafterConfig]
    profile: CostProfile
    lineage: str
    seats: Seats
    reserve: tuple[ReserveProcess, ...]


@dataclass(frozen=True, slots=True)
class TakenOver:
    """What a cell has taken over: the target, what was recorded, and the drafters that answered."""

    target: VerifierReady
    record: CellRecord
    drafters: list[DrafterReady]


@dataclass
class Takeover:
    """Whether workers outlive their cell, and under which names the next one finds them.

    Args:
        system: name of the application, which no two on a Ray cluster share; empty for none: the workers
            end with the cell.
        config: of the cell, as it starts. Another one leaves other workers alone.

    Attributes:
        lineage: a name for this cell and those that take over from it, for what is reserved.
    """

    system: str
    config: FlotillaConfig
    lineage: str = field(default_factory=lambda: secrets.token_hex(8))

    @cached_property
    def _prefix(self) -> str:
        described = f"{flotilla_version()} {self.config.model_dump_json()}"
        return f"{self.system}:{hashlib.blake2b(described.encode(), digest_size=8).hexdigest()}:"

    @property
    def orphan_s(self) -> float | None:
        """How long workers wait for another cell; None if they end with theirs."""
        return self.config.health.orphan_s if self.system else None

    def options(self, worker: str) -> dict[str, Any]:
        """Ray's options for a worker's actor."""
        if self.orphan_s is None:
            return {}
        name = f"{self._prefix}{self.lineage}:{worker}:{secrets.token_hex(4)}"
        return {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}

    def group_options(self) -> dict[str, Any]:
        """Ray's options for a placement group."""
        if self.orphan_s is None:
            return {}
        name = f"{group_prefix(self.system)}{self.lineage}:{secrets.token_hex(4)}"
        return {"name": name, "lifetime": "detached"}

    async def waiting(self, worker: str) -> list[Any]:
        """Actors of that name whose cells are gone."""
        found = await asyncio.to_thread(lambda: list(self._found(worker)))
        waits = await asyncio.gather(*map(_waits, found))
        return [actor for actor, is_so in zip(found, waits, strict=True) if is_so]

    def _found(self, worker: str) -> Iterator[Any]:
        if self.orphan_s is None:
            return
        for name in _names():
            if name.startswith(self._prefix) and name.split(":", 3)[3].rpartition(":")[0] == worker:
                try:
                    yield ray.get_actor(name, NAMESPACE)
                except ValueError:  # it has ended since
                    continue


def living_lineages(system: str) -> set[str]:
    """Those of the system's cells, dead or alive, of whose workers there are some."""
    return {name.split(":", 3)[2] for name in _names() if name.startswith(f"{system}:")}


def _names() -> list[str]:
    """Names of all workers: system, digest of the configuration, lineage, worker, and a number."""
    actors = list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]


async def _waits(actor: Any) -> bool:
    try:
        async with asyncio.timeout(WAITS_S):
            return bool(await actor.waits.remote())
    except (RayError, TimeoutError):
        return False  # it ends, or is being loaded for another cell


async def claim(actor: Any, *, is_left: bool) -> tuple[Any, Any] | None:
    """Have it work for this cell (`actors._Worker.take_over`); None if it works for another or is silent.

    Args:
        actor: a worker.
        is_left: whether its cell is known to be gone: then it is ended if it does not answer.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            taken: tuple[Any, Any] | None = await actor.take_over.remote()
            return taken
    except (RayError, TimeoutError) as error:
        _log.warning("a worker that may have been left behind does not answer: %r", error)
        if is_left:
            end(actor)
        return None


def group_prefix(system: str) -> str:
    """How the names of a system's placement groups begin; then comes the lineage."""
    return f"flotilla:{system}:"
