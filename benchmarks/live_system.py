"""A served system seen from outside: its processes by role, its metrics, and the way to end one of them."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import demo
from benchmarks.server_process import ServerProcess, free_port
from cluster.config import FlotillaConfig
from zoo.registry import TARGET

# By name, because it ships no types.
psutil: Any = importlib.import_module("psutil")

_ROOT = Path(__file__).resolve().parents[1]

Role = Literal["drafter", "verifier", "scheduler", "front_end"]
ROLES: tuple[Role, ...] = ("drafter", "verifier", "scheduler", "front_end")

#: By a part of the process title that Ray gives an actor: its class, with its name and method around it.
TITLES = {
    "DrafterWorker": "drafter",
    "VerifierWorker": "verifier",
    "ServeReplica:flotilla:Cell": "scheduler",
    "ServeReplica:flotilla:FrontEnd": "front_end",
    "ServeReplica:flotilla:Directory": "directory",
    "ServeController": "Serve controller",
}
#: The processes whose memory is ours to answer for.
OUR_ROLES = ("drafter", "verifier", "scheduler", "front_end", "directory")


@dataclass(frozen=True, slots=True)
class SystemOptions:
    """What is served: the demo family with prompt lookup and a model drafter.

    Attributes:
        cells, front_ends, tensor_parallel: how many of each.
        num_slots: KV slots of a cell.
        policy: how it speculates.
        config: a configuration file that is served in place of that; its port is not used.
    """

    cells: int = 1
    front_ends: int = 2
    tensor_parallel: int = 1
    num_slots: int = 16384
    policy: str = "flotilla"
    config: Path | None = None

    def record(self) -> dict[str, Any]:
        """The options as they can be written to JSON; of a configuration file, what it says."""
        if self.config is None:
            return asdict(self)
        served = self.served()
        return {
            "cells": served.scaling.cells.min,
            "front_ends": served.http.front_ends,
            "tensor_parallel": served.target.tensor_parallel,
            "num_slots": served.target.num_slots,
            "policy": served.policy.name,
            "config": str(self.config),
        }

    def served(self) -> FlotillaConfig:
        """The configuration.

        Raises:
            ValueError: if the file cannot be read or is none, or for an unknown policy.
        """
        if self.config is not None:
            return demo.load_config(self.config)
        return demo.validated(
            {
                "target": {
                    "path": f"zoo:{TARGET}",
                    "num_slots": self.num_slots,
                    "tensor_parallel": self.tensor_parallel,
                },
                "drafters": [
                    {"kind": "prompt_lookup", "name": "lookup"},
                    {"kind": "model", "name": "general", "path": "zoo:drafter-general-2x192"},
                ],
                "policy": {"name": self.policy},
                "http": {"front_ends": self.front_ends},
                "scaling": {"cells": {"min": self.cells, "max": self.cells}},
            }
        )


@dataclass(frozen=True, slots=True)
class Scrape:
    """The metrics of the whole system at one time."""

    samples: tuple[tuple[str, Mapping[str, str], float], ...]

    @classmethod
    def of(cls, text: str) -> Scrape:
        """Read an exposition."""
        return cls(
            tuple(
                (sample.name, sample.labels, sample.value)
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            )
        )

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples of this name with these labels; 0 without any."""
        return sum(
            value
            for found, of, value in self.samples
            if found == name and all(of.get(label) == wanted for label, wanted in labels.items())
        )

    def members(self, kind: str) -> set[str]:
        """Ids of the members of a kind that answered this scrape; cells only if they serve."""
        answered = {
            of["member"]
            for name, of, value in self.samples
            if name == "flotilla_member_scraped" and of["kind"] == kind and value
        }
        if kind == "cell":
            ready = {of["cell"] for name, of, value in self.samples if name == "flotilla_ready" and value}
            return answered & ready
        return answered


class LiveSystem:
    """A running server.

    Args:
        url: of its API.
        pid: of the process that started it; all others descend from it.
        config: what it serves.
    """

    def __init__(self, url: str, pid: int, config: FlotillaConfig) -> None:
        self.url = url
        self.config = config
        self._root = psutil.Process(pid)

    def processes(self) -> dict[str, list[Any]]:
        """Living processes by role, as `psutil.Process`; those of Ray itself are `Ray`, this one's child
        `server`."""
        found: dict[str, list[Any]] = {"server": [self._root]}
        for process in self._root.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                found.setdefault(role_of(" ".join(process.cmdline())), []).append(process)
        return found

    def pids(self, role: str) -> set[int]:
        """Process ids of a role."""
        return {process.pid for process in self.processes().get(role, [])}

    async def scrape(self, session: aiohttp.ClientSession) -> Scrape | None:
        """The metrics of all members; None if nobody answers."""
        text = await self._get(session, "/metrics")
        return None if text is None else Scrape.of(text)

    async def drafters(self, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
        """How the process of each drafter is, of any one cell if there are several; none if nobody answers.

        As told by `/debug/workers`, since `/admin/drafters` is refused where there may be several cells.
        """
        text = await self._get(session, "/debug/workers")
        workers = [] if text is None else msgspec.json.decode(text)["data"]
        return [one for one in workers if one["kind"] == "drafter"]

    async def _get(self, session: aiohttp.ClientSession, path: str) -> str | None:
        timeout = aiohttp.ClientTimeout(total=5.0)
        # A connection of its own each time: one that is kept may lead to a process that hangs.
        headers = {"Connection": "close"}
        try:
            async with session.get(self.url + path, timeout=timeout, headers=headers) as response:
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None


def role_of(command: str) -> str:
    """The role of a process by its command line."""
    if not command.startswith("ray::"):
        return "Ray"
    return next((role for part, role in TITLES.items() if part in command), "Ray")


@contextmanager
def serving(options: SystemOptions, logs: Path) -> Iterator[LiveSystem]:
    """Start a server of its own, with its log in `logs`, and stop it in the end.

    Raises:
        RuntimeError: if it does not start, with the end of its log.
    """
    config = options.served()
    logs.mkdir(parents=True, exist_ok=True)
    config_file = logs / "flotilla.yaml"
    config_file.write_text(config.model_dump_json(indent=1))  # JSON is YAML
    port = free_port()
    command: Sequence[str] = [
        *(sys.executable, "-m", "deployments.cli", "serve"),
        *("--config", str(config_file), "--port", str(port)),
    ]
    with (
        _stopped_in_order(),
        ServerProcess("flotilla", command, port, "/ready", log=logs / "server.log", cwd=_ROOT) as server,
    ):
        server.wait_until_ready()
        yield LiveSystem(server.url, server.pid, config)


@contextmanager
def _stopped_in_order() -> Iterator[None]:
    """SIGTERM, too, leaves through the code that stops the server, which has a session of its own."""

    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
