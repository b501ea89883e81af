"""Workers of a cell that is gone: who dies before all are taken over is not taken for one that serves."""

from __future__ import annotations

import asyncio
import importlib.metadata
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.config import FlotillaConfig
from cluster.cost_model import DEFAULT_PROFILE
from cluster.drafter_config import PromptLookupConfig
from cluster.events import DrafterReady, Event, VerifierReady
from cluster.lifecycle import Lifecycle
from cluster.seats import Seats
from cluster.takeover import CellRecord, Instance, Takeover
from cluster.worker import VERIFIER
from cluster.worker_set import WorkerSet
from tests.cluster.test_drafter_pool import capabilities


class Process:
    """A worker's actor."""

    def __init__(self, renewed: object) -> None:
        self._taken: tuple[object, object] = renewed, None
        self._connections: list[asyncio.BaseTransport] = []
        self.answers, self.is_connected = asyncio.Event(), asyncio.Event()
        self.take_over = SimpleNamespace(remote=self._take_over)
        self.open = SimpleNamespace(remote=self._open)
        self.where = SimpleNamespace(remote=self._where)

    def leave(self, record: CellRecord) -> None:
        self._taken = self._taken[0], record

    def die(self) -> None:
        for connection in self._connections:
            connection.close()

    async def _take_over(self) -> tuple[object, object]:
        await self.answers.wait()
        return self._taken

    async def _open(
        self, token: bytes, heartbeat_s: float, *log: object, busy_polling: bool
    ) -> tuple[str, int]:
        server = await asyncio.get_running_loop().create_server(lambda: Port(self), "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        return host, port

    def connected(self, connection: asyncio.BaseTransport) -> None:
        self._connections.append(connection)
        self.is_connected.set()

    async def _where(self) -> tuple[str, int]:
        return "a node", 0


class Port(asyncio.Protocol):
    """Of a process, for steps; nobody asks for any."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._process.connected(transport)


class Workers(WorkerSet):
    """Of which those that died are never done with: to end a process, and make another, Ray would start."""

    async def stop(self, name: str) -> None:
        await asyncio.Event().wait()


class Cell:
    """One that finds a target and two drafters, of which `late` answers when it is told to."""

    def __init__(self) -> None:
        small = PromptLookupConfig(name="small", replicas=2)
        config = FlotillaConfig.model_validate(
            {
                "target": {"path": "unused"},
                "drafters": [small.model_dump()],
                "pool": {"core_affinity": False},
            }
        )
        self.target, self.drafter = (
            Process(VerifierReady(100, 100, 50)),
            Process(capabilities("prompt_lookup")),
        )
        self.late = Process(capabilities("prompt_lookup"))
        self.target.answers.set()
        self.drafter.answers.set()
        instances = [
            Instance("small/0", small, self.drafter, "measured"),
            Instance("small/1", small, self.late, "measured"),
        ]
        self.target.leave(
            CellRecord([self.target], instances, {"small": small}, DEFAULT_PROFILE, "line", Seats(), ())
        )
        takeover = SimpleNamespace(waiting=self._waiting, lineage="", orphan_s=None, group_options=dict)
        self.told: list[str] = []
        workers = Workers(config, b"secret", cast(Any, self), cast(Any, takeover))
        self.lifecycle = Lifecycle(config, workers, cast(Any, self))

    async def _waiting(self, worker: str) -> list[Process]:
        return [self.target]

    def verified(self, rank: int, data: bytes) -> None:
        """Nobody asks the target anything."""

    def lost(self, name: str) -> None:
        self.lifecycle.lost(name)

    def restarted(self, name: str) -> None:
        self.told.append(f"{name} is made again")

    def handle(self, event: Event) -> None:
        self.told.append(type(event).__name__)

    async def take_over_while(self, process: Process) -> list[DrafterReady | VerifierReady]:
        """Who serves, if this one dies before the last is taken over."""
        taking = asyncio.create_task(self.lifecycle.take_over())
        async with asyncio.timeout(5):
            await process.is_connected.wait()
            await asyncio.sleep(0.05)  # until it is connected there, too
            process.die()
            await asyncio.sleep(0.05)  # until that is known
            self.late.answers.set()
            taken = await taking
        assert taken is not None
        return taken[1]


async def test_a_target_that_dies_before_all_are_taken_over_is_not_called_ready() -> None:
    cell = Cell()
    with pytest.raises(ConnectionError, match="died while it was loaded"):
        await cell.take_over_while(cell.target)
    assert not cell.told, "the cell has not begun"


async def test_a_drafter_that_dies_before_all_are_taken_over_is_made_again_once() -> None:
    cell = Cell()
    ready = await cell.take_over_while(cell.drafter)
    assert [one.name if isinstance(one, DrafterReady) else VERIFIER for one in ready] == [VERIFIER, "small/1"]
    life = cell.lifecycle.lives["small/0"]
    assert life.state == "restarting"
    assert life.task is not None
    life.task.cancel()
    assert cell.told == ["small/0 is made again"]
    assert cell.lifecycle.lives["small/1"].state == "loading"


def test_a_checkout_that_is_not_installed_names_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("cluster.metric_set.version", version)
    config = FlotillaConfig.model_validate({"target": {"path": "zoo:target-8x384"}})
    first, second = (Takeover("system", config).options("target")["name"] for _ in range(2))
    assert first.startswith("system:")
    assert first.split(":")[:2] == second.split(":")[:2]  # what a cell that takes over looks for
    assert first != second
