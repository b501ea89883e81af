"""`flotilla bench soak`: steady load for long; memory, files, slots and latency must stay as they are."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import environment, tables
from benchmarks.live_client import LiveClient
from benchmarks.live_comparison import Comparison
from benchmarks.live_load import OpenLoop, load_rate, measure_baseline
from benchmarks.live_requests import mixed_requests
from benchmarks.live_rest import left_in, left_when_idle
from benchmarks.live_system import OUR_ROLES, LiveSystem, Scrape, SystemOptions, psutil, serving
from benchmarks.live_ties import explain_differences
from benchmarks.soak_verdict import Slope, by_minute, fit, latency_change

_MB = 1 << 20
#: Of the memory fit, unless told otherwise: caches fill and allocators settle. Share, and most seconds.
_WARMUP_SHARE, _WARMUP_MOST_S = 0.25, 600.0
_LATENCY_WINDOW_S = 600.0


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """What is run.

    Attributes:
        system: what is served.
        minutes: of load.
        load: share of the saturated request rate.
        rate: requests per second in place of that; 0 measures it.
        saturation_s, saturation_streams: how saturation is measured.
        sample_s: between two looks at the processes.
        warmup_s: left out of fits; None takes a quarter of the time, at most ten minutes.
        limit_mb_per_hour: memory that grows faster is a leak.
        num_distinct: distinct requests.
        max_tokens: bound on every answer.
        seed: of the workload.
        logs: where the server's log goes.
    """

    system: SystemOptions = field(default_factory=SystemOptions)
    minutes: float = 60.0
    load: float = 0.8
    rate: float = 0.0
    saturation_s: float = 20.0
    saturation_streams: int = 24
    sample_s: float = 10.0
    warmup_s: float | None = None
    limit_mb_per_hour: float = 8.0
    num_distinct: int = 84
    max_tokens: int = 96
    seed: int = 0
    logs: Path = Path("soak-logs")

    @property
    def settled_s(self) -> float:
        """When fits begin, from the start of the load."""
        if self.warmup_s is not None:
            return self.warmup_s
        return min(_WARMUP_SHARE * self.minutes * 60.0, _WARMUP_MOST_S)


@dataclass(slots=True)
class Samples:
    """What was seen, by process and of the system; times in seconds from the start of the load."""

    processes: dict[tuple[str, int], list[dict[str, float]]] = field(default_factory=dict)
    system: list[dict[str, float]] = field(default_factory=list)

    def add_processes(self, time_s: float, found: dict[str, list[Any]]) -> None:
        """Look at every process once."""
        for role, processes in found.items():
            for process in processes:
                try:
                    with process.oneshot():
                        memory = process.memory_info()
                        full = process.memory_full_info()
                        sample = {
                            "time_s": time_s,
                            "rss_mb": memory.rss / _MB,
                            # Shared pages count by the share of each; not everywhere known.
                            "pss_mb": getattr(full, "pss", memory.rss) / _MB,
                            "private_mb": getattr(full, "uss", memory.rss) / _MB,
                            "fds": float(process.num_fds()),
                            "threads": float(process.num_threads()),
                        }
                except psutil.Error:
                    continue
                self.processes.setdefault((role, process.pid), []).append(sample)


def run(options: SoakOptions) -> dict[str, Any]:
    """Serve, load, watch.

    Raises:
        RuntimeError: if the system does not start, or cannot be loaded.
    """
    with (
        tables.console.status(f"Starting the system (log: {options.logs / 'server.log'})"),
        serving(options.system, options.logs) as system,
    ):
        return asyncio.run(_measure(options, system))


async def _measure(options: SoakOptions, system: LiveSystem) -> dict[str, Any]:
    origin = time.monotonic()

    def clock() -> float:
        return time.monotonic() - origin

    requests = mixed_requests(options.num_distinct, options.seed, options.max_tokens)
    client = LiveClient(system.url, give_up_s=120.0, clock=clock)
    samples = Samples()
    async with client, aiohttp.ClientSession() as session:
        baseline = await measure_baseline(client, requests)
        compared = Comparison(baseline.references)
        rate = await load_rate(
            client,
            requests,
            compared,
            rate=options.rate,
            load=options.load,
            saturation_s=options.saturation_s,
            saturation_streams=options.saturation_streams,
        )
        before = await _idle(system, session)
        load = OpenLoop(client, requests, rate.per_s, baseline.slos, compared, "soak")
        started = clock()
        watching = asyncio.create_task(_watch(options, system, session, samples, started, clock))
        try:
            await load.run(options.minutes * 60.0)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        after = await _idle(system, session)
    target = system.config.target
    ties = explain_differences(
        target.path, compared.differences, baseline.references, target.quantization, target.dtype
    )
    memory = fits(samples, options.settled_s, options.limit_mb_per_hour)
    span = started + options.minutes * 60.0
    window_s = min(_LATENCY_WINDOW_S, options.minutes * 20.0)
    return {
        "benchmark": "soak",
        "environment": environment.describe(),
        **environment.of_cell(system.config, __name__),
        "options": {
            **{k: v for k, v in asdict(options).items() if k not in ("system", "logs")},
            "system": options.system.record(),
        },
        "saturated_requests_per_s": rate.saturated_per_s,
        "requests_per_s": rate.per_s,
        "client_late_s": load.late_s,
        "answers": compared.summary(),
        "differences": ties,
        "num_unproven": sum(not one["proven"] for one in ties),
        "memory": memory,
        "counts": counts(samples, options.settled_s),
        "idle": {"before": before, "after": after},
        "latency": latency_change(load.ended, started, span, window_s),
        "minutes": by_minute(load.ended, started),
        "samples": {
            "processes": [
                {"role": role, "pid": pid, "samples": found}
                for (role, pid), found in samples.processes.items()
            ],
            "system": samples.system,
        },
    }


async def _idle(system: LiveSystem, session: aiohttp.ClientSession) -> dict[str, Any]:
    """The system without load: what is left of requests, its processes, and its metrics' series."""
    left = await left_when_idle(system, session)
    scrape = await system.scrape(session)
    found = system.processes()
    return {
        "left": left,
        "processes": {role: len(found.get(role, ())) for role in OUR_ROLES},
        "kv_use": None if scrape is None else scrape.total("flotilla_kv_cache_usage_ratio"),
        "series": None if scrape is None else len(scrape.samples),
    }


async def _watch(
    options: SoakOptions,
    system: LiveSystem,
    session: aiohttp.ClientSession,
    samples: Samples,
    started: float,
    clock: Any,
) -> None:
    keeps_answers = system.config.idempotency.enabled
    while True:
        time_s = clock() - started
        # Reading the memory maps of large processes takes milliseconds each: in a thread.
        await asyncio.to_thread(samples.add_processes, time_s, system.processes())
        scrape = await system.scrape(session)
        if scrape is not None:
            samples.system.append(
                {
                    "time_s": time_s,
                    **left_in(scrape),
                    "kv_use": scrape.total("flotilla_kv_cache_usage_ratio"),
                    "series": float(len(scrape.samples)),
                    "answers_full": float(not keeps_answers or answers_are_full(scrape)),
                    "requests": scrape.total("flotilla_requests_total"),
                    "output_tokens": scrape.total("flotilla_generation_tokens_total"),
                    "cells": float(len(scrape.members("cell"))),
                    "front_ends": float(len(scrape.members("front_end"))),
                    "drafters": scrape.total("flotilla_drafters_ready"),
                }
            )
        await asyncio.sleep(max(0.0, started + time_s + options.sample_s - clock()))


def answers_are_full(scrape: Scrape) -> bool:
    """Whether every front end keeps as many answers for retries as it may: each new one costs an old one."""
    dropped: Counter[str] = Counter()
    for name, labels, value in scrape.samples:
        if name == "flotilla_idempotent_answers_dropped_total":
            # One that was abandoned made no room for others.
            dropped[labels["front_end"]] += 0 if labels["reason"] == "abandoned" else int(value)
    return bool(dropped) and all(dropped.values())


def fits(samples: Samples, settled_s: float, limit: float) -> list[dict[str, Any]]:
    """Growth of every process's private memory in MB per hour, and whether it is a leak.

    Private memory (USS), because shared pages come and go with other processes. Front ends are judged from
    when they keep as many answers as they may, which takes longer than `settled_s` at a low rate.
    """
    found = []
    full_s = next((one["time_s"] for one in samples.system if one["answers_full"]), math.inf)
    for (role, pid), of in samples.processes.items():
        begin_s = max(settled_s, full_s) if role == "front_end" else settled_s
        settled = [one for one in of if one["time_s"] >= begin_s]
        slope: Slope | None = None
        if len(settled) >= 3:
            hours = [one["time_s"] / 3600.0 for one in settled]
            slope = fit(hours, [one["private_mb"] for one in settled])
        found.append(
            {
                "role": role,
                "pid": pid,
                "ours": role in OUR_ROLES,
                "first_mb": of[0]["private_mb"],
                "last_mb": of[-1]["private_mb"],
                "pss_mb": of[-1]["pss_mb"],
                "mb_per_hour": None if slope is None else asdict(slope),
                "verdict": "too short to say" if slope is None else slope.verdict(limit),
            }
        )
    return found


def counts(samples: Samples, settled_s: float) -> list[dict[str, Any]]:
    """Descriptors and threads of our processes when settled and at the end."""
    found = []
    for (role, pid), of in samples.processes.items():
        settled: Sequence[dict[str, float]] = [one for one in of if one["time_s"] >= settled_s] or of[-1:]
        if role in OUR_ROLES:
            found.append(
                {
                    "role": role,
                    "pid": pid,
                    **{
                        f"{name}_{when}": of_when[name]
                        for name in ("fds", "threads")
                        for when, of_when in (("settled", settled[0]), ("end", settled[-1]))
                    },
                    "fds_most": max(one["fds"] for one in settled),
                }
            )
    return found


def leaks(record: dict[str, Any]) -> list[str]:
    """What has grown or was left, in words; nothing is as it should be."""
    found = []
    for process in record["memory"]:
        if process["ours"] and process["verdict"] == "grows":
            slope = process["mb_per_hour"]
            found.append(
                f"{process['role']} {process['pid']} grows by {slope['value']:.1f} MB/hour "
                f"({slope['low']:.1f} to {slope['high']:.1f})"
            )
    before, after = record["idle"]["before"], record["idle"]["after"]
    found += [f"{name}: {value:g} left when idle" for name, value in after["left"].items() if value]
    found += [
        f"{role}: {before['processes'][role]} processes before the load, {number} after it"
        for role, number in after["processes"].items()
        # Processes in reserve are made in idle time, so one more drafter may be there than at first.
        if number != before["processes"][role] and role != "drafter"
    ]
    return found


def is_sound(record: dict[str, Any]) -> bool:
    """Whether nothing leaks, no answer was lost or wrong, and latency stayed."""
    answers = record["answers"]
    wrong = sum(answers[name] for name in ("turned_away", "lost", "duplicated", "missing"))
    wrong += record["num_unproven"]
    return not wrong and not leaks(record) and record["latency"]["within"] is not False
