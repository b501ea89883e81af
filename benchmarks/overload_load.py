"""Clients of the overload benchmark: several API keys and tiers, who come back when they were told to."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.load_client import LoadClient, Outcome
from benchmarks.prompts import Prompt
from benchmarks.workload import BenchRequest

#: Tiers with objectives, and one without; with what share of every key's requests asks for it.
SHARES: Mapping[str, float] = {"interactive": 0.3, "standard": 0.4, "batch": 0.3}
SERVED = ("interactive", "standard")
# A refused client comes back so often before it gives up.
MOST_RETURNS = 2
# Whoever is told to come back later than this gives up; OpenAI's clients do not wait longer either.
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is due.

    Attributes:
        at_s: from the start of the run.
        key: name of the API key that sends it.
        tier: which it asks for.
    """

    at_s: float
    key: str
    tier: str


@dataclass(frozen=True, slots=True)
class Phases:
    """The load over time: usual, then too much, then usual.

    Attributes:
        usual: requests per second of each key at usual load.
        greedy: the key that sends more.
        greedy_rate: its rate during the overload.
        before_s, during_s, after_s: how long each lasts.
    """

    usual: Mapping[str, float]
    greedy: str
    greedy_rate: float
    before_s: float
    during_s: float
    after_s: float

    @property
    def starts_s(self) -> float:
        """When the overload begins."""
        return self.before_s

    @property
    def ends_s(self) -> float:
        """When the overload ends."""
        return self.before_s + self.during_s

    @property
    def total_s(self) -> float:
        """When the last request is sent."""
        return self.ends_s + self.after_s

    def of(self, at_s: float) -> str:
        """Name of the phase at a time."""
        if at_s < self.starts_s:
            return "before"
        return "during" if at_s < self.ends_s else "after"

    def arrivals(self, seed: int) -> list[Arrival]:
        """Poisson arrivals of all keys, the same for a seed."""
        found = []
        for number, (key, usual) in enumerate(sorted(self.usual.items())):
            rng = random.Random(seed * 1000 + number)
            burst = self.greedy_rate if key == self.greedy else usual
            for begins_s, ends_s, rate in (
                (0.0, self.starts_s, usual),
                (self.starts_s, self.ends_s, burst),
                (self.ends_s, self.total_s, usual),
            ):
                at_s = begins_s + rng.expovariate(rate)
                while at_s < ends_s:
                    tier = rng.choices(list(SHARES), weights=list(SHARES.values()))[0]
                    found.append(Arrival(at_s, key, tier))
                    at_s += rng.expovariate(rate)
        return sorted(found, key=lambda one: one.at_s)


@dataclass(slots=True)
class Attempt:
    """A request as it was sent once; times in seconds from the start of the run.

    Attributes:
        key, tier: whose, and of what tier.
        number: 0 for the first, 1 when it came back, and so on.
        sent_s: when.
        told_s: `Retry-After` if it was refused.
        is_refused: whether the answer was a 429.
        attained: whether the whole answer came, within the objectives of its tier.
        ttft_ms, tpot_ms: as the client saw them.
        num_tokens: of prompt and output, if it was served.
        error: what else went wrong.
        arrival: which of the arrivals it is of.
    """

    key: str
    tier: str
    number: int
    sent_s: float
    arrival: int
    told_s: float | None = None
    is_refused: bool = False
    attained: bool = False
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    num_tokens: int = 0
    error: str = ""


def attains(outcome: Outcome, objective: Mapping[str, float]) -> bool:
    """Whether the answer came within objectives in milliseconds, by field of `slo`."""
    seen = {"ttft_ms": outcome.ttft_ms, "tpot_ms": outcome.tpot_ms, "e2e_ms": outcome.e2e_ms}
    return outcome.is_ok and all(
        (latency := seen[name]) is None or latency <= limit for name, limit in objective.items()
    )


async def saturate(
    client: LoadClient,
    prompts: Sequence[Prompt],
    max_tokens: int,
    keys: Sequence[str],
    seconds: float,
    streams: int,
) -> tuple[float, list[Outcome]]:
    """Requests per second that end while so many streams are always open, and the answers."""
    started, ended = time.perf_counter(), []

    async def stream(number: int) -> None:
        turn = number
        while time.perf_counter() - started < seconds:
            request = BenchRequest(turn, prompts[turn % len(prompts)], max_tokens)
            outcome = await client.send(request, headers=bearer(keys[number % len(keys)]))
            if not outcome.is_ok:
                raise RuntimeError(f"a request failed while saturation was measured: {outcome.error}")
            if time.perf_counter() - started < seconds:
                ended.append(outcome)
            turn += streams

    await asyncio.gather(*map(stream, range(streams)))
    return len(ended) / seconds, ended


def bearer(key: str) -> dict[str, str]:
    """The header of an API key."""
    return {"Authorization": f"Bearer {key}"}


async def play(
    client: LoadClient,
    arrivals: Sequence[Arrival],
    prompts: Sequence[Prompt],
    max_tokens: int,
    keys: Mapping[str, str],
    objectives: Mapping[str, Mapping[str, float]],
) -> list[Attempt]:
    """Send everything when it is due; whoever is refused comes back when told. All attempts, by time.

    Args:
        client: sends.
        arrivals: what is due when.
        prompts: taken in turn.
        max_tokens: bound on every answer.
        keys: API keys by name.
        objectives: of the tiers that have some, in milliseconds, by field of `slo`.
    """
    origin = time.perf_counter()
    attempts: list[Attempt] = []

    async def one(index: int, arrival: Arrival) -> None:
        objective = objectives.get(arrival.tier, {})
        extra: dict[str, Any] = {"service_tier": arrival.tier, "seed": index}
        if objective:
            extra["slo"] = {**objective, "on_miss": "reject"}
        await asyncio.sleep(max(0.0, origin + arrival.at_s - time.perf_counter()))
        request = BenchRequest(index, prompts[index % len(prompts)], max_tokens)
        for number in range(MOST_RETURNS + 1):
            attempt = Attempt(arrival.key, arrival.tier, number, time.perf_counter() - origin, index)
            attempts.append(attempt)
            outcome = await client.send(request, origin, extra, bearer(keys[arrival.key]))
            attempt.is_refused, attempt.told_s = outcome.status == 429, outcome.retry_after_s
            attempt.attained = attains(outcome, objective)
            attempt.ttft_ms, attempt.tpot_ms = outcome.ttft_ms, outcome.tpot_ms
            attempt.num_tokens = outcome.num_prompt_tokens + outcome.num_output_tokens
            attempt.error = "" if attempt.is_refused else outcome.error
            if not attempt.is_refused or attempt.told_s is None or number == MOST_RETURNS:
                return
            if attempt.told_s > PATIENCE_S:
                return
            await asyncio.sleep(attempt.told_s)

    await asyncio.gather(*(one(index, arrival) for index, arrival in enumerate(arrivals)))
    return sorted(attempts, key=lambda attempt: attempt.sent_s)
