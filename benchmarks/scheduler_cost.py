"""`flotilla bench scheduler`: processor time of a scheduler step, by phase and number of running requests."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import wraps
from typing import Any

import numpy as np

from benchmarks import environment, tables
from benchmarks.objectives import Limit
from benchmarks.scripted_loop import ScriptedLoop
from benchmarks.scripted_workers import TOKEN
from cluster.config import FlotillaConfig, PolicyConfig, SchedulerConfig, TargetConfig
from cluster.core import SchedulerCore
from cluster.drafter_pool import DrafterPool
from cluster.planning import StepPlanner
from cluster.policies.registry import POLICIES
from cluster.stream_messages import Objective, Submit
from cluster.verify_calls import VerifyCalls
from engine.sampling_params import SamplingParams

PROMPT_TOKENS, OUTPUT_TOKENS = 96, 256
# AdaServe's three classes, as multiples of 30 ms and in milliseconds.
TPOTS_MS = (Limit(1.2, relative=True).value * 30.0, 50.0, 150.0)
WARM_STEPS = 40

# What is timed as which phase. A phase's time does not count the phases within it.
PHASES: tuple[tuple[type, str, str], ...] = (
    (SchedulerCore, "_verify_done", "verdicts taken in"),
    (SchedulerCore, "_draft_done", "drafts taken in"),
    (SchedulerCore, "reflect", "reflect"),
    (StepPlanner, "read_ahead", "reading ahead"),
    (DrafterPool, "assign", "drafters assigned"),
    (StepPlanner, "draft", "draft calls built"),
    (StepPlanner, "select", "trees cut"),
    (VerifyCalls, "build", "verify call built"),
)
REST = "all else"


@dataclass(slots=True)
class Stopwatch:
    """Processor seconds of this thread by phase."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _within: list[float] = field(default_factory=list)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted."""

        @wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._within.append(0.0)
            begun = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.thread_time() - begun
                self.seconds[name] += took - self._within.pop()
                if self._within:
                    self._within[-1] += took

        return wrapped

    @contextmanager
    def watching(self, core: SchedulerCore) -> Iterator[None]:
        """Times the phases of whatever the core does within."""
        policy, rule = type(core.planner.policy), type(core.batcher.rule)
        watched = [
            *PHASES,
            (policy, "plan", "policy plans"),
            (policy, "select", "policy selects"),
            *((rule, name, "batching rule") for name in ("admit", "decode", "verify", "prefill")),
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in watched]
        for owner, name, label in watched:
            setattr(owner, name, self.timed(label, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Processor time of a step in a setting.

    Attributes:
        policy: who decides.
        requests: running in every step.
        microseconds: of a step: all that the core does from one verify call to the next.
        drafted: mean nodes verified per request and step, roots left out.
        committed: mean tokens per request and step.
        phases: microseconds by phase, timed in a run of their own; timing them costs some in each.
    """

    policy: str
    requests: int
    microseconds: float
    drafted: float
    committed: float
    phases: dict[str, float]


class ScriptedCell(ScriptedLoop):
    """Always so many requests running: who ends is replaced at once."""

    def __init__(self, policy: str, batching: str, requests: int, seed: int) -> None:
        config = FlotillaConfig(
            target=TargetConfig(path="scripted"),
            policy=PolicyConfig(name=policy, max_width=4),
            scheduler=SchedulerConfig(batching=batching, max_running=requests, prefill_chunk=2048),
        )
        super().__init__(config, seed)
        rng = np.random.default_rng((seed, 1))
        for _ in range(requests):
            # The first ones end at different times, as later ones then do.
            self._submit(int(rng.integers(8, OUTPUT_TOKENS)))

    def run(self, steps: int) -> None:
        """So many verify calls that decode."""
        until = self.steps + steps
        while self.steps < until:
            self.next()

    def ended(self) -> None:
        """Another comes in its place."""
        self._submit(OUTPUT_TOKENS)

    def _submit(self, num_output: int) -> None:
        submit = Submit(
            request_id=f"request-{self.count}",
            prompt=[TOKEN] * PROMPT_TOKENS,
            sampling=SamplingParams(temperature=0.0, max_tokens=num_output, seed=self.count),
            objective=Objective(tpot_ms=TPOTS_MS[self.count % len(TPOTS_MS)]),
        )
        self.arrives(submit)


def measure(
    policy: str,
    requests: int,
    *,
    batching: str = "flotilla",
    steps: int = 300,
    repeats: int = 5,
    seed: int = 0,
) -> StepTime:
    """A step's time: the least of several identical runs, for others on the machine only add to it.

    Args:
        policy: who decides.
        requests: running.
        batching: rule.
        steps: of each run, after some that are not counted.
        repeats: runs.
        seed: of drafts and verdicts; runs of one seed make the same decisions.
    """
    least = float("inf")
    for _ in range(repeats):
        cell = ScriptedCell(policy, batching, requests, seed)
        cell.run(WARM_STEPS)
        gc.collect()
        cell.seconds = 0.0
        cell.run(steps)
        least = min(least, cell.seconds)
    watch, totals = Stopwatch(), cell.core.totals
    drafted, committed = totals.verified_tokens, totals.committed_tokens
    cell.seconds = 0.0
    with watch.watching(cell.core):
        cell.run(steps)
    phases = {name: 1e6 * seconds / steps for name, seconds in sorted(watch.seconds.items())}
    phases[REST] = 1e6 * (cell.seconds - sum(watch.seconds.values())) / steps
    decodes = steps * requests
    return StepTime(
        policy=policy,
        requests=requests,
        microseconds=1e6 * least / steps,
        drafted=(totals.verified_tokens - drafted) / decodes,
        committed=(totals.committed_tokens - committed) / decodes,
        phases=phases,
    )


def print_times(found: Sequence[StepTime]) -> None:
    """A table of steps and one of their phases for each policy."""
    for policy in dict.fromkeys(entry.policy for entry in found):
        mine = [entry for entry in found if entry.policy == policy]
        heads = [policy, *(f"{entry.requests} requests" for entry in mine)]
        names = sorted({name for entry in mine for name in entry.phases} - {REST})
        rows = [["microseconds per step", *(tables.number(entry.microseconds, 0) for entry in mine)]]
        each = [tables.number(entry.microseconds / entry.requests, 1) for entry in mine]
        rows.append(["... by request", *each])
        rows.append(["nodes drafted", *(tables.number(entry.drafted, 2) for entry in mine)])
        rows.append(["tokens committed", *(tables.number(entry.committed, 2) for entry in mine)])
        for name in [*names, REST]:
            rows.append([f"  {name}", *(tables.number(entry.phases.get(name), 0) for entry in mine)])
        tables.console.print(tables.plain_table("", heads, rows))


def run(
    policies: Sequence[str], requests: Sequence[int], batching: str, steps: int, repeats: int, seed: int
) -> dict[str, Any]:
    """Measure, print and return the JSON record.

    Raises:
        ValueError: for a policy or a batching rule that does not exist.
    """
    unknown = sorted(set(policies) - set(POLICIES))
    if unknown:
        raise ValueError(f"unknown policy {', '.join(unknown)}; known: {', '.join(sorted(POLICIES))}")
    found = []
    with tables.console.status("Measuring steps..."):
        for policy in policies:
            for count in requests:
                found.append(
                    measure(policy, count, batching=batching, steps=steps, repeats=repeats, seed=seed)
                )
    print_times(found)
    return {
        "benchmark": "scheduler",
        "environment": environment.describe(),
        "clock": "processor time of the thread; least of the runs",
        "batching": batching,
        "steps": steps,
        "repeats": repeats,
        "times": [asdict(entry) for entry in found],
    }
