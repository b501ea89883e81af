"""`python -m benchmarks.refusal_cost`: processor time of the scheduler for a request that it refuses.

A cell is asked for four times what it can serve, four fifths of that by one of four API keys, in three tiers,
of which two have objectives. Its workers answer from a script; no models run. Refusals take the scheduler's
time from its steps, and in an overload there are many more of them than of anything else.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from benchmarks import environment, tables
from benchmarks.cli_common import JsonFile, Seed
from benchmarks.scripted_loop import ScriptedLoop
from benchmarks.scripted_workers import TOKEN
from cluster.config import FlotillaConfig, PolicyConfig, SchedulerConfig, TargetConfig
from cluster.events import Reject, RequestArrived
from cluster.stream_messages import Objective, Submit, Tenant
from cluster.tier_config import OnMiss
from engine.sampling_params import SamplingParams

#: Places and queue of the cells that are measured.
SIZES = ((8, 64), (48, 128), (64, 256))
TIMES = 4.0
PROMPT_TOKENS, OUTPUT_TOKENS = 96, 64
# Tokens that a request gets from a step, about; the rate of arrivals follows from it.
TOKENS_PER_STEP = 2.0
KEYS = {"greedy": 0.8, "one": 0.07, "two": 0.07, "three": 0.06}


@dataclass(frozen=True, slots=True)
class Tier:
    """A service tier: its share of the requests, its priority and what it asks for."""

    share: float
    priority: int
    objective: Objective
    on_miss: OnMiss


TIERS = {
    "interactive": Tier(0.3, -1, Objective(tpot_ms=60.0, ttft_ms=800.0), "reject"),
    "standard": Tier(0.4, 0, Objective(tpot_ms=100.0, ttft_ms=1600.0), "reject"),
    "batch": Tier(0.3, 10, Objective(), "serve"),
}


@dataclass(frozen=True, slots=True)
class RefusalTime:
    """Processor time of refusals of a cell.

    Attributes:
        places, queue: requests that it decodes at once, and that may wait.
        refused, asked: requests.
        milliseconds, median_ms: of a refusal, mean and median.
    """

    places: int
    queue: int
    refused: int
    asked: int
    milliseconds: float
    median_ms: float


class OverloadedCell(ScriptedLoop):
    """Poisson arrivals at several times the rate that can be served."""

    def __init__(self, places: int, queue: int, seed: int) -> None:
        tiers = {name: {"priority": tier.priority} for name, tier in TIERS.items()}
        config = FlotillaConfig.model_validate(
            {
                "target": TargetConfig(path="scripted"),
                "policy": PolicyConfig(name="flotilla", max_width=4),
                "scheduler": SchedulerConfig(max_running=places, max_waiting=queue, prefill_chunk=2048),
                "tiers": tiers,
            }
        )
        super().__init__(config, seed)
        self.asked = 0
        self.refusals_s: list[float] = []
        self._rng = random.Random(seed)
        step_s = self._costs.verify_seconds(places, round(places * TOKENS_PER_STEP), 0)
        self._rate = TIMES * places * TOKENS_PER_STEP / (OUTPUT_TOKENS * step_s)
        self.next_arrives()

    def run(self, refusals: int) -> None:
        """Until so many were refused."""
        until = len(self.refusals_s) + refusals
        while len(self.refusals_s) < until:
            event, actions, took_s = self.next()
            if isinstance(event, RequestArrived):
                self.next_arrives()
                if any(isinstance(action, Reject) for action in actions):
                    self.refusals_s.append(took_s)

    def next_arrives(self) -> None:
        """The next request is due."""
        (name,) = self._rng.choices(list(TIERS), [tier.share for tier in TIERS.values()])
        (label,) = self._rng.choices(list(KEYS), list(KEYS.values()))
        tier = TIERS[name]
        self.asked += 1
        submit = Submit(
            request_id=f"request-{self.asked}",
            prompt=[*([TOKEN] * (PROMPT_TOKENS - 1)), self.asked % 32000],
            sampling=SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, seed=self.asked),
            objective=tier.objective,
            tier=name,
            priority=tier.priority,
            tenant=Tenant(label),
            on_miss=tier.on_miss,
        )
        self.arrives(submit, self._rng.expovariate(self._rate))


def measure(places: int, queue: int, refusals: int, repeats: int, seed: int) -> RefusalTime:
    """The least of several identical runs: others on the machine only add."""
    runs = []
    for _ in range(repeats):
        cell = OverloadedCell(places, queue, seed)
        cell.run(refusals // 2)  # the queue fills up
        cell.run(refusals)
        runs.append((cell, cell.refusals_s[-refusals:]))
    cell, _ = runs[0]
    return RefusalTime(
        places,
        queue,
        len(cell.refusals_s),
        cell.asked,
        1e3 * min(statistics.fmean(times_s) for _, times_s in runs),
        1e3 * min(statistics.median(times_s) for _, times_s in runs),
    )


def run(refusals: int, repeats: int, seed: int) -> dict[str, Any]:
    """Measure, print and return the JSON record."""
    with tables.console.status("Measuring refusals..."):
        found = [measure(places, queue, refusals, repeats, seed) for places, queue in SIZES]
    heads = ["places", "queue", "refused, of all", "mean, ms", "median, ms"]
    rows = [
        [
            str(one.places),
            str(one.queue),
            f"{one.refused} of {one.asked}",
            tables.number(one.milliseconds, 2),
            tables.number(one.median_ms, 2),
        ]
        for one in found
    ]
    tables.console.print(tables.plain_table("", heads, rows))
    return {
        "benchmark": "refusal cost",
        "environment": environment.describe(),
        "clock": "processor time of the thread; least of the runs",
        "repeats": repeats,
        "times": [asdict(one) for one in found],
    }


def main(
    refusals: Annotated[int, typer.Option(min=10, help="Refusals that are timed.")] = 600,
    repeats: Annotated[int, typer.Option(min=1, help="Runs, of which the quickest counts.")] = 5,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure what it costs the scheduler to refuse a request; no models run."""
    tables.write_json(json_file, run(refusals, repeats, seed))


if __name__ == "__main__":
    typer.run(main)
