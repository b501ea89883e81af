"""`flotilla bench scaling`: load raises the number of cells and lowers it; nothing may be lost or differ."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ray import serve

from benchmarks import environment, report
from benchmarks.load_client import LoadClient, Outcome
from benchmarks.objectives import NO_SLO, Slo
from benchmarks.prompts import Prompt
from benchmarks.workload import BenchRequest
from cluster.config import FlotillaConfig
from cluster.members import Member
from deployments.application import APP_NAME
from deployments.directory import DIRECTORY_NAME, ask
from deployments.serving import running
from zoo.registry import TARGET

_SAMPLE_S = 0.5
#: After the last phase, how long the number of cells may take to come back.
_RETURN_S = 120.0

_BEGINNINGS = (
    "def merge_sorted(left, right):",
    "class LinkedList:",
    "import os\n\ndef walk(path):",
    "The town council met on Tuesday to",
    "Once upon a time there was a",
    "def fibonacci(n):",
    "A summary of the report:",
    "for line in open(path):",
)


@dataclass(frozen=True, slots=True)
class ScalingOptions:
    """What is run.

    Attributes:
        max_cells: most cells.
        streams: open streams in each phase, closed loop.
        phase_s: seconds of each phase.
        num_distinct: distinct requests, which all phases repeat.
        max_tokens: of every answer.
        max_running: requests a cell decodes at once.
        tpot_ms, ttft_ms: objectives of every request.
        upscale_delay_s, downscale_delay_s, target_queue_ms: of the policy.
        drain_timeout_s: how long a cell that is removed goes on with what it runs.
        seed: of sampling.
    """

    max_cells: int = 3
    streams: tuple[int, ...] = (1, 24, 1)
    phase_s: tuple[float, ...] = (10.0, 90.0, 30.0)
    num_distinct: int = 32
    max_tokens: int = 96
    max_running: int = 4
    tpot_ms: float = 40.0
    ttft_ms: float = 1000.0
    upscale_delay_s: float = 2.0
    downscale_delay_s: float = 10.0
    target_queue_ms: float = 300.0
    drain_timeout_s: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.streams) != len(self.phase_s):
            raise ValueError(f"{len(self.streams)} phases of streams and {len(self.phase_s)} of seconds")


@dataclass(slots=True)
class _Run:
    """What was seen; times in seconds from the start of the load."""

    started: float
    samples: list[dict[str, float]] = field(default_factory=list)
    outcomes: list[tuple[float, int, Outcome]] = field(default_factory=list)
    streams: int = 0


def system(options: ScalingOptions) -> FlotillaConfig:
    """The lightest cells there are: the demo target with prompt lookup."""
    return FlotillaConfig.model_validate(
        {
            "target": {"path": f"zoo:{TARGET}", "num_slots": 8192},
            "drafters": [{"kind": "prompt_lookup", "name": "lookup"}],
            "scheduler": {"max_running": options.max_running},
            "http": {"port": 0},
            "scaling": {
                "cells": {
                    "max": options.max_cells,
                    "upscale_delay_s": options.upscale_delay_s,
                    "downscale_delay_s": options.downscale_delay_s,
                    "target_queue_ms": options.target_queue_ms,
                    "drain_timeout_s": options.drain_timeout_s,
                }
            },
        }
    )


def requests(options: ScalingOptions) -> list[BenchRequest]:
    """The distinct requests; each differs from the others by its prompt and its seed."""
    slo = Slo(ttft_ms=options.ttft_ms, tpot_ms=options.tpot_ms)
    found = []
    for index in range(options.num_distinct):
        text = f"{_BEGINNINGS[index % len(_BEGINNINGS)]}  # {index}\n"
        prompt = Prompt(domain="scaling", text=text)
        found.append(BenchRequest(index=index, prompt=prompt, max_tokens=options.max_tokens, slo=slo))
    return found


def run(options: ScalingOptions) -> dict[str, Any]:
    """Run it on this machine, on a Ray of its own.

    Raises:
        RuntimeError: if an answer of the one-cell run failed, which leaves nothing to compare with.
    """
    with running(system(options)) as url:
        return asyncio.run(_measure(options, url))


async def _measure(options: ScalingOptions, url: str) -> dict[str, Any]:
    async with LoadClient(url, "", sampling={"temperature": 0.8, "return_token_ids": True}) as client:
        client.model = (await client.models())[0]["id"]
        work = requests(options)
        reference = {}
        for request in work:  # one cell, one request at a time, without objectives that would add a cell
            alone = replace(request, slo=NO_SLO)
            outcome = await client.send(alone, extra={"seed": options.seed + request.index})
            if not outcome.is_ok:
                raise RuntimeError(f"the one-cell run failed: {outcome.error}")
            reference[request.index] = outcome
        seen = _Run(time.perf_counter())
        watching = asyncio.create_task(_watch(seen))
        for streams, seconds in zip(options.streams, options.phase_s, strict=True):
            seen.streams = streams
            until = time.perf_counter() + seconds
            await asyncio.gather(*(_stream(client, work, seen, n, until, options) for n in range(streams)))
        seen.streams = 0
        give_up = time.perf_counter() + _RETURN_S
        while seen.samples[-1]["cells"] > 1 and time.perf_counter() < give_up:
            await asyncio.sleep(_SAMPLE_S)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    return _record(options, seen, reference)


async def _stream(
    client: LoadClient,
    work: Sequence[BenchRequest],
    seen: _Run,
    number: int,
    until: float,
    options: ScalingOptions,
) -> None:
    index = number
    while time.perf_counter() < until:
        request = work[index % len(work)]
        outcome = await client.send(request, seen.started, extra={"seed": options.seed + request.index})
        seen.outcomes.append((time.perf_counter() - seen.started, request.index, outcome))
        if not outcome.is_ok:
            await asyncio.sleep(_SAMPLE_S)  # refused, say: it is counted, and not asked for at once again
        index += options.streams[1] if len(options.streams) > 1 else 1
        index += 1


async def _watch(seen: _Run) -> None:
    directory = serve.get_deployment_handle(DIRECTORY_NAME, APP_NAME)
    while True:
        members: list[Member] = await ask(directory, "members", timeout_s=30)
        cells = [member for member in members if member.kind == "cell"]
        ready = [member for member in cells if member.state == "ready"]
        objectives = sum(cell.stats.get("objectives", 0.0) for cell in ready)
        attained = sum(
            cell.stats.get("objectives", 0.0) * cell.stats.get("attainment", 1.0) for cell in ready
        )
        seen.samples.append(
            {
                "time_s": time.perf_counter() - seen.started,
                "streams": seen.streams,
                "cells": len(cells),
                "ready": len(ready),
                "draining": sum(cell.state == "draining" for cell in cells),
                "running": sum(cell.stats.get("running", 0.0) for cell in ready),
                "waiting": sum(cell.stats.get("waiting", 0.0) for cell in ready),
                "queue_s": max((cell.stats.get("queue_s", 0.0) for cell in ready), default=0.0),
                "predicted_attainment": attained / objectives if objectives else 1.0,
                "tokens_per_s": sum(cell.stats.get("tokens_per_s", 0.0) for cell in ready),
            }
        )
        await asyncio.sleep(_SAMPLE_S)


def _record(options: ScalingOptions, seen: _Run, reference: dict[int, Outcome]) -> dict[str, Any]:
    failed = [outcome for _, _, outcome in seen.outcomes if not outcome.is_ok]
    differing = [
        index
        for _, index, outcome in seen.outcomes
        if outcome.is_ok and outcome.token_ids != reference[index].token_ids
    ]
    ready = [int(sample["ready"]) for sample in seen.samples]
    return {
        "environment": environment.describe(),
        **environment.of_cell(system(options), __name__),
        "options": asdict(options),
        "num_requests": len(seen.outcomes),
        "num_failed": len(failed),
        "errors": sorted({outcome.error for outcome in failed})[:8],
        "num_differing": len(differing),
        "differing": sorted(set(differing)),
        "most_ready": max(ready, default=0),
        "last_cells": int(seen.samples[-1]["cells"]) if seen.samples else 0,
        "samples": seen.samples,
        "requests": [
            {
                "ended_s": ended_s,
                "index": index,
                "ttft_ms": outcome.ttft_ms,
                "tpot_ms": outcome.tpot_ms,
                "attained": report.meets_all(outcome),
                "tokens": outcome.num_output_tokens,
            }
            for ended_s, index, outcome in seen.outcomes
        ],
    }
