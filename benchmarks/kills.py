"""`flotilla bench kills`: processes of a served system die under load, and no answer may show it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import environment, tables
from benchmarks.kill_recovery import Kill, Throughput, assess, attainment, by_role, longest_gap
from benchmarks.kill_recovery import unexplained_breaks as num_unexplained
from benchmarks.live_client import LiveClient
from benchmarks.live_comparison import Comparison
from benchmarks.live_load import OpenLoop, load_rate, measure_baseline
from benchmarks.live_requests import mixed_requests
from benchmarks.live_rest import left_when_idle
from benchmarks.live_system import ROLES, LiveSystem, Role, Scrape, SystemOptions, psutil, serving
from benchmarks.live_ties import explain_differences

_POLL_S = 0.2
#: After the last kill, how long its consequences are watched.
_LAST_S = 20.0
# A process that is stopped and not replaced goes on again so long before the next kill.
_RESUME_BEFORE_S = 2.0


@dataclass(frozen=True, slots=True)
class KillOptions:
    """What is run.

    Attributes:
        system: what is served.
        minutes: of kills.
        every_s: between two kills.
        roles: what is killed, in turn.
        stop: stop processes (SIGSTOP) in place of ending them.
        load: share of the saturated request rate.
        rate: requests per second in place of that; 0 measures it.
        saturation_s, saturation_streams: how saturation is measured.
        quiet_s: load without kills before the first, to which throughput is compared.
        num_distinct: distinct requests.
        max_tokens: bound on every answer.
        give_up_s: after so long without an answer, a request is lost.
        seed: of the workload and of who is killed.
        logs: where the server's log goes.
    """

    system: SystemOptions = field(default_factory=SystemOptions)
    minutes: float = 30.0
    every_s: float = 20.0
    roles: tuple[Role, ...] = ROLES
    stop: bool = False
    load: float = 0.6
    rate: float = 0.0
    saturation_s: float = 20.0
    saturation_streams: int = 24
    quiet_s: float = 30.0
    num_distinct: int = 84
    max_tokens: int = 96
    give_up_s: float = 120.0
    seed: int = 0
    logs: Path = Path("kills-logs")

    def __post_init__(self) -> None:
        if not 2 * _RESUME_BEFORE_S <= self.every_s < math.inf:
            raise ValueError(f"--every {self.every_s:g} leaves no time to see anything; at least 4 s")


def parse_roles(text: str) -> tuple[Role, ...]:
    """Roles from `drafter,verifier`; raises ValueError with those there are."""
    named = [part.strip() for part in text.split(",")]
    found: list[Role] = [role for name in named for role in ROLES if role == name]
    if len(found) != len(named):
        raise ValueError(f"--roles {text}: only {', '.join(ROLES)} can be killed")
    return tuple(found)


class Killer:
    """Ends one process after the other and watches for the next to take its place.

    Args:
        system: whose processes.
        session: for questions to it.
        options: what, how often.
        clock: of the run.
    """

    def __init__(
        self,
        system: LiveSystem,
        session: aiohttp.ClientSession,
        options: KillOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._system = system
        self._session = session
        self._options = options
        self._clock = clock
        self._random = random.Random(options.seed)
        self.kills: list[Kill] = []
        self.skipped: list[str] = []

    async def run(self, seconds: float) -> None:
        """Kill for so long."""
        started = self._clock()
        for number in itertools.count():
            due = started + number * self._options.every_s
            if due - started >= seconds:
                break
            await asyncio.sleep(max(0.0, due - self._clock()))
            role = self._options.roles[number % len(self._options.roles)]
            until = due + self._options.every_s
            await self._kill(role, max(until, self._clock() + 2 * _RESUME_BEFORE_S))
        await asyncio.sleep(max(0.0, min(_LAST_S, self._options.every_s) - _POLL_S))
        for kill, following in itertools.pairwise(self.kills):
            kill.until_s = following.at_s
        if self.kills:
            self.kills[-1].until_s = self._clock()

    async def _kill(self, role: Role, until: float) -> None:
        victims = await self._victims(role)
        before = await self._system.scrape(self._session)
        if not victims or before is None:
            self.skipped.append(f"{role}: none was there to be killed")
            return
        pid, name = self._random.choice(victims)
        number_before = len(self._system.pids(role))
        kill = Kill(self._clock(), role, pid, name)
        serving: set[int] = set()
        os.kill(pid, signal.SIGSTOP if self._options.stop else signal.SIGKILL)
        self.kills.append(kill)
        is_replaced = {
            "drafter": lambda: self._drafter_is_back(kill, serving),
            "verifier": lambda: self._verifier_is_back(kill, number_before),
            "scheduler": lambda: self._member_is_back("cell", before),
            "front_end": lambda: self._member_is_back("front_end", before),
        }[role]
        try:
            await self._watch(kill, is_replaced, until - _RESUME_BEFORE_S)
            if role == "drafter" and kill.replaced_s is not None:
                await self._first_draft(kill, until - _RESUME_BEFORE_S)
        finally:
            if self._options.stop and is_alive(pid):
                kill.resumed = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    async def _victims(self, role: Role) -> list[tuple[int, str]]:
        if role != "drafter":
            return [(pid, role) for pid in sorted(self._system.pids(role))]
        # Processes in reserve look the same and draft for nobody: the system says which are drafters.
        instances = await self._system.drafters(self._session)
        living = self._system.pids(role)
        return [(one["pid"], one["worker"]) for one in instances if one.get("pid") in living]

    async def _watch(self, kill: Kill, is_replaced: Callable[[], Awaitable[bool]], until: float) -> None:
        while self._clock() < until:
            await asyncio.sleep(_POLL_S)
            if self._options.stop and kill.noticed_s is None and not is_alive(kill.pid):
                kill.noticed_s = self._clock() - kill.at_s
            if await is_replaced():
                kill.replaced_s = self._clock() - kill.at_s
                return

    async def _drafter_is_back(self, kill: Kill, serving: set[int]) -> bool:
        """Whether every cell has a drafter of that name again; any one of them answers.

        `serving` are the processes of that name that were found since the kill, also by earlier answers.
        """
        for one in await self._system.drafters(self._session):
            if one["worker"] == kill.name and one["state"] in ("ready", "busy"):
                serving.add(one.get("pid", 0))
        return len(serving - {0, kill.pid}) >= self._system.config.scaling.cells.min

    async def _verifier_is_back(self, kill: Kill, number_before: int) -> bool:
        pids = self._system.pids("verifier")
        if kill.pid in pids or len(pids) < number_before:
            return False
        scrape = await self._system.scrape(self._session)
        wanted = self._system.config.scaling.cells.min
        return scrape is not None and scrape.total("flotilla_ready") >= wanted

    async def _member_is_back(self, kind: str, before: Scrape) -> bool:
        scrape = await self._system.scrape(self._session)
        if scrape is None:
            return False
        now, then = scrape.members(kind), before.members(kind)
        return bool(now - then) and len(now) >= len(then)

    async def _first_draft(self, kill: Kill, until: float) -> None:
        """Until a token of the kind was accepted that was drafted after the instance was back."""
        kind = kill.name.partition("/")[0]
        first: float | None = None
        while self._clock() < until:
            scrape = await self._system.scrape(self._session)
            if scrape is not None:
                count = scrape.total("flotilla_drafter_tokens_total", drafter=kind, outcome="accepted")
                if first is None:
                    first = count
                elif count > first:
                    kill.first_token_s = self._clock() - kill.at_s
                    return
            await asyncio.sleep(_POLL_S)


def is_alive(pid: int) -> bool:
    """Whether a process runs or is stopped; one that waits for its parent to notice its end does neither."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def run(options: KillOptions) -> dict[str, Any]:
    """Serve, load, kill, compare.

    Raises:
        RuntimeError: if the system does not start, or fails undisturbed.
    """
    with (
        tables.console.status(f"Starting the system (log: {options.logs / 'server.log'})"),
        serving(options.system, options.logs) as system,
    ):
        return asyncio.run(_measure(options, system))


async def _measure(options: KillOptions, system: LiveSystem) -> dict[str, Any]:
    started = time.monotonic()
    arrivals: list[tuple[float, int]] = []

    def clock() -> float:
        return time.monotonic() - started

    requests = mixed_requests(options.num_distinct, options.seed, options.max_tokens)
    client = LiveClient(
        system.url,
        give_up_s=options.give_up_s,
        clock=clock,
        on_tokens=lambda at, tokens: arrivals.append((at, tokens)),
    )
    async with client, aiohttp.ClientSession() as session:
        baseline = await measure_baseline(client, requests)
        undisturbed = Comparison(baseline.references)
        rate = await load_rate(
            client,
            requests,
            undisturbed,
            rate=options.rate,
            load=options.load,
            saturation_s=options.saturation_s,
            saturation_streams=options.saturation_streams,
        )
        quiet = OpenLoop(client, requests, rate.per_s, baseline.slos, undisturbed, "quiet")
        quiet_from = clock()
        await quiet.run(options.quiet_s)
        quiet_until = quiet_from + options.quiet_s

        compared = Comparison(baseline.references)
        killer = Killer(system, session, options, clock)
        load = OpenLoop(client, requests, rate.per_s, baseline.slos, compared, "load")
        killed_from = clock()
        await asyncio.gather(
            load.run(options.minutes * 60.0 + min(_LAST_S, options.every_s)),
            killer.run(options.minutes * 60.0),
        )
        duration_s = clock() - killed_from
        afterwards = Comparison(baseline.references)
        for request in requests:
            afterwards.add(await client.ask(request, f"afterwards-{request.index}"))
        rest = await left_when_idle(system, session)
    throughput = Throughput(arrivals)
    gap = longest_gap(throughput.times, quiet_from + 1.0, quiet_until)
    assess(
        killer.kills,
        throughput,
        load.ended,
        usual_rate=throughput.rate(quiet_from + 1.0, quiet_until),
        usual_gap_s=gap[1] - gap[0] if gap else 0.0,
        one_cell=system.config.scaling.cells.min == 1,
    )
    target = system.config.target
    ties = explain_differences(
        target.path,
        [*undisturbed.differences, *compared.differences, *afterwards.differences],
        baseline.references,
        target.quantization,
        target.dtype,
    )
    return {
        "benchmark": "kills",
        "environment": environment.describe(),
        **environment.of_cell(system.config, __name__),
        "options": {**asdict(options), "logs": str(options.logs), "system": options.system.record()},
        "slos": baseline.slos,
        "saturated_requests_per_s": rate.saturated_per_s,
        "requests_per_s": rate.per_s,
        "client_late_s": load.late_s,
        "usual_tokens_per_s": throughput.rate(quiet_from + 1.0, quiet_until),
        "usual_pause_s": gap[1] - gap[0] if gap else None,
        "duration_s": duration_s,
        "undisturbed": undisturbed.summary(),
        "killed": compared.summary(),
        "afterwards": afterwards.summary(),
        "differences": ties,
        "num_unproven": sum(not one["proven"] for one in ties),
        "unexplained_breaks": num_unexplained(load.ended, killer.kills),
        "attainment_quiet": attainment(quiet.ended, ())["by_time"],
        "attainment": attainment(load.ended, killer.kills),
        "recovery": by_role(killer.kills),
        "skipped": killer.skipped,
        "left_when_idle": rest,
        "kills": [asdict(kill) for kill in killer.kills],
        "killed_from_s": killed_from,
        "tokens_per_s": [
            [at, throughput.rate(at, at + 1.0)]
            for at in range(int(quiet_from), int(killed_from + duration_s))
        ],
        "requests": [
            [round(one.sent_s, 3), round(one.ended_s, 3), one.domain, one.attained] for one in load.ended
        ],
    }


def is_lossless(record: dict[str, Any]) -> bool:
    """Whether nothing was lost, duplicated, missing or different beyond near ties, and nothing is left."""
    parts = [record[name] for name in ("undisturbed", "killed", "afterwards")]
    wrong = sum(part["lost"] + part["duplicated"] + part["missing"] for part in parts)
    # While processes die, some may be refused till they give up; with all there, nobody at this load.
    wrong += record["undisturbed"]["turned_away"] + record["afterwards"]["turned_away"]
    wrong += sum(part["broken_with_a_wrong_beginning"] for part in parts) + record["num_unproven"]
    return not wrong and not record["unexplained_breaks"] and not any(record["left_when_idle"].values())
