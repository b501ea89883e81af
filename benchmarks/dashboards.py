"""`flotilla bench dashboards`: load on a real system, a real Prometheus, and every query asked of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import urllib.request
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc

from benchmarks import dashboard_checks as checking
from benchmarks import environment
from benchmarks.load_client import LoadClient
from benchmarks.objectives import Slo
from benchmarks.prometheus_server import Prometheus
from benchmarks.prompts import Prompt
from benchmarks.server_process import free_port
from benchmarks.workload import BenchRequest
from cluster.config import FlotillaConfig
from deployments.dashboards.command import generated
from deployments.demo import demo_config
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.proto.flotilla.v1 import generation_pb2_grpc as pb_grpc
from deployments.serving import running

_WINDOW_S = 10
_BEGINNING = "import os\nimport sys\n\n\ndef read_lines(path, encoding):\n"
_GENEROUS = Slo(ttft_ms=20_000, tpot_ms=2_000, e2e_ms=60_000)
_TIGHT = Slo(ttft_ms=1, tpot_ms=2_000, e2e_ms=60_000)
_IMPOSSIBLE = Slo(e2e_ms=1)


@dataclass(frozen=True, slots=True)
class DashboardOptions:
    """What is run.

    Attributes:
        seconds: of load.
        streams: requests open at once; with `max_running` and `max_waiting` enough for a full queue.
        max_running: requests the cell decodes at once.
        max_waiting: requests it queues.
        scrape: file for the exposition as it is after the load.
    """

    seconds: float = 60.0
    streams: int = 14
    max_running: int = 6
    max_waiting: int = 4
    scrape: Path | None = None


def system(options: DashboardOptions) -> FlotillaConfig:
    """The demo family with tiers that are kept, missed, lowered and refused."""
    raw = demo_config().model_dump()
    raw["http"]["port"] = 0
    raw["grpc"] |= {"enabled": True, "port": free_port()}
    raw["scheduler"] |= {"max_running": options.max_running, "max_waiting": options.max_waiting}
    raw["tiers"] = {
        "interactive": {"tpot_ms": 200.0, "ttft_ms": 5000.0, "priority": -1},
        "strict": {"e2e_ms": 1.0, "downgrade_to": "bulk"},
        "bulk": {"priority": 1, "e2e_ms": 60_000.0},
    }
    # Drafts in every step, also where a slow machine would make the default refrain.
    raw["policy"]["name"] = "adaserve"
    return FlotillaConfig.model_validate(raw)


def run(options: DashboardOptions) -> dict[str, Any]:
    """Serve, load, scrape, and ask every query.

    Raises:
        RuntimeError: if Prometheus or the system does not start.
        deployments.dashboards.command.DashboardsFailed: if the dashboards cannot be generated.
    """
    files = generated()
    rules = {name.rpartition("/")[2]: text for name, text in files.items() if name.startswith("rules/")}
    config = system(options)
    with running(config) as url, Prometheus({"flotilla": [urlsplit(url).netloc]}, rules) as prometheus:
        begun = time.time()
        answers = asyncio.run(_load(options, config, url))
        ended = time.time()
        if options.scrape is not None:
            with urllib.request.urlopen(f"{url}/metrics", timeout=30) as exposition:
                options.scrape.write_bytes(exposition.read())
        checks = checking.all_checks(files, f"{_WINDOW_S}s", f"{max(2, int(ended - begun))}s")
        found = checking.dead(checks, lambda expr: prometheus.query_range(expr, begun, ended, 1.0))
    return {
        "options": asdict(options),
        "environment": environment.describe(),
        "answers": dict(sorted(answers.items())),
        "num_queries": Counter("may be empty" if one.may_be_empty else "must not be empty" for one in checks),
        "num_by_file": Counter(check.where for check in checks),
        "dead": [{**asdict(one.check), "reason": one.reason} for one in found],
    }


async def _load(options: DashboardOptions, config: FlotillaConfig, url: str) -> Counter[str]:
    answers: Counter[str] = Counter()
    deadline = time.monotonic() + options.seconds
    numbers = itertools.count()
    kinds = _kinds(config)
    async with LoadClient(url, "", sampling={"temperature": 0.0}) as client:
        client.model = (await client.models())[0]["id"]

        async def stream() -> None:
            while time.monotonic() < deadline:
                number = next(numbers)
                slo, extra = kinds[number % len(kinds)]
                text = f"{_BEGINNING}    # {number % 5}\n    "
                request = BenchRequest(number, Prompt("load", text=text), 24 + 8 * (number % 4), slo=slo)
                outcome = await client.send(request, extra=extra)
                answers[f"HTTP {outcome.status}"] += 1
                if not outcome.is_ok:
                    await asyncio.sleep(0.2)

        await asyncio.gather(*(stream() for _ in range(options.streams)), _call_grpc(config, deadline))
    return answers


def _kinds(config: FlotillaConfig) -> list[tuple[Slo, dict[str, Any]]]:
    """Objectives and body fields of requests of every kind that a panel is about."""
    tiers: list[tuple[Slo, dict[str, Any]]] = [
        (_GENEROUS, {}),
        (_TIGHT, {}),
        (_GENEROUS, {"service_tier": "interactive", "ignore_eos": True}),
        (Slo(), {"service_tier": "strict"}),
        (_GENEROUS, {"service_tier": "bulk"}),
        (_IMPOSSIBLE, {"service_tier": "interactive"}),
    ]
    tiers[-1][1]["slo"] = {"e2e_ms": 1.0, "on_miss": "reject"}
    drafters = [(_GENEROUS, {"speculation": {"drafters": [one.name]}}) for one in config.drafters]
    return [*tiers, *drafters]


async def _call_grpc(config: FlotillaConfig, deadline: float) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{config.grpc.port}") as channel:
        stub: Any = pb_grpc.GenerationStub(channel)
        while time.monotonic() < deadline:
            with contextlib.suppress(grpc.aio.AioRpcError):  # refused like others, and counted likewise
                await stub.Generate(pb.GenerateRequest(prompt=_BEGINNING, max_tokens=8))
            await asyncio.sleep(0.5)
