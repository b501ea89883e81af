"""`flotilla bench pipeline`: goodput by number of micro-batches in one warm cell (SPIN, figure 13)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import ray

from benchmarks import demo, environment, tables
from benchmarks import prompts as prompt_sources
from benchmarks.cell_engine import CellEngine
from benchmarks.compare import cell_config
from benchmarks.compare_workload import Texts
from benchmarks.engine import Deck
from benchmarks.engine_under_test import RunResult, Task
from benchmarks.greedy_differences import GreedyDifferences, print_differences
from benchmarks.transformers_engine import Reference
from cluster.config import FlotillaConfig
from cluster.free_cores import settle_draft_ahead
from cluster.pipeline import MOST_MICRO_BATCHES

PLAIN, NO_OVERLAP, SPIN, AUTO = "no speculation", "no overlap", "spin", "auto"
CHOOSING = (SPIN, AUTO)
# Fields of the policy and of the scheduler.
Setting = tuple[dict[str, Any], dict[str, Any]]
IDLE_TIMEOUT_S = 20.0
# What must hold (issue 4): the heuristic's goodput by the best count's, and the pipeline's by no overlap's.
LEAST_OF_BEST, LEAST_GAIN = 0.95, 1.15


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """What to measure.

    Attributes:
        config: of the cell; the demo family if None.
        source: of prompts.
        batches: requests at once.
        most: counts of micro-batches from 1 to this.
        rounds: measured rounds of all settings, interleaved.
        waves: requests in a run, as a multiple of the batch.
        max_tokens: bound on an answer.
        policy: speculation policy.
        seed: order of the prompts.
    """

    config: Path | None = None
    source: str = "zoo"
    batches: tuple[int, ...] = (8, 16, 32)
    most: int = 6
    rounds: int = 2
    waves: int = 2
    max_tokens: int = 64
    policy: str = "flotilla"
    seed: int = 0


@dataclass(slots=True)
class Measured:
    """One setting at one batch: its runs, and verify calls by how many micro-batches there were."""

    rates: list[float] = field(default_factory=list)
    calls: dict[int, int] = field(default_factory=dict)

    @property
    def goodput(self) -> float:
        """Median tokens per second."""
        return median(self.rates)

    @property
    def count(self) -> int:
        """The number of micro-batches most verify calls had."""
        return max(self.calls, key=lambda count: self.calls[count], default=1)


class PipelineCell(CellEngine):
    """A warm cell whose scheduler's settings change between runs."""

    def use(self, policy: Mapping[str, Any], scheduler: Mapping[str, Any]) -> None:
        """Change them; waits until the cell is idle."""
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            try:
                ray.get(self._cell.set_policy.remote(dict(policy), dict(scheduler)))
            except RuntimeError:  # not idle yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return

    def calls_by_count(self) -> dict[int, int]:
        """Verify calls of the present settings so far, by number of micro-batches."""
        stats = ray.get(self._cell.stats.remote())
        return {n: int(stats.get(f"calls_{n}", 0)) for n in range(1, MOST_MICRO_BATCHES + 1)}


def settings(config: FlotillaConfig, most: int, policy: str) -> dict[str, Setting]:
    """Settings by name; all of them set the same fields, for the cell keeps what it is not told."""
    ahead = settle_draft_ahead(config, os.cpu_count() or 1).scheduler.draft_ahead
    ours = {"name": policy}
    named: dict[str, Setting] = {
        PLAIN: ({"name": "autoregressive"}, {"micro_batches": 1, "draft_ahead": ahead}),
        NO_OVERLAP: (ours, {"micro_batches": 1, "draft_ahead": 0}),
    }
    for count in range(1, most + 1):
        named[str(count)] = (ours, {"micro_batches": count, "draft_ahead": ahead})
    for name in CHOOSING:
        named[name] = (ours, {"micro_batches": name, "draft_ahead": ahead})
    return named


def run(options: PipelineOptions) -> dict[str, Any]:
    """Measure, print, and return the record."""
    config = cell_config(options.config)
    demo.changed(config, policy={"name": options.policy})  # before the cell is started
    texts = Texts(demo.directory(config.target.path))
    prompts = prompt_sources.load(options.source)
    encoded = [list(texts.encode(prompt).token_ids or ()) for prompt in prompts]
    deck = Deck(prompts, encoded, bound=options.max_tokens, seed=options.seed)
    named = settings(config, options.most, options.policy)
    measured = {batch: {name: Measured() for name in named} for batch in options.batches}
    differences = GreedyDifferences(texts.end_tokens)
    with tables.progress() as bar:
        task = bar.add_task(
            "Starting the cell", total=(options.rounds + 1) * len(named) * len(options.batches)
        )
        cell = PipelineCell("pipeline", config, texts.end_tokens)
        try:
            for number in range(options.rounds + 1):
                is_warm_up = number == 0
                for batch in options.batches:
                    waves = 1 if is_warm_up else options.waves
                    requests = _deal(deck, batch * waves)
                    reference: RunResult | None = None
                    for name in _rotated(list(named), number):
                        bar.update(task, description=f"{batch} requests, {name}")
                        cell.use(*named[name])
                        before = cell.calls_by_count()
                        result = cell.run(requests, batch)
                        bar.advance(task)
                        if is_warm_up:
                            continue
                        one = measured[batch][name]
                        one.rates.append(result.num_tokens / result.seconds)
                        for count, calls in cell.calls_by_count().items():
                            one.calls[count] = one.calls.get(count, 0) + calls - before[count]
                        if reference is not None:
                            differences.compare(name, requests, reference.outputs, result.outputs)
                        reference = reference or result
        finally:
            cell.close()
    record = {
        "environment": environment.describe(),
        "options": asdict(options),
        **environment.of_cell(config, __name__),
        "batches": {str(batch): summary(by_name) for batch, by_name in measured.items()},
        "num_outputs": sum(differences.num_outputs.values()),
        "num_different": sum(differences.num_different.values()),
    }
    show(record)
    target = config.target
    judged = differences.judge(
        lambda: Reference(demo.directory(target.path), target.dtype, target.quantization)
    )
    print_differences(judged, record["num_outputs"], "those of another setting")
    return record | {"differences": judged}


def summary(by_name: Mapping[str, Measured]) -> dict[str, Any]:
    """What was measured at one batch, and whether it reaches what must hold."""
    counts = {int(name): one.goodput for name, one in by_name.items() if name.isdigit()}
    best = max(counts, key=counts.__getitem__)
    none, plain = by_name[NO_OVERLAP].goodput, by_name[PLAIN].goodput
    chosen: dict[str, dict[str, Any]] = {
        name: {
            "count": by_name[name].count,
            "goodput": by_name[name].goodput,
            "by_best": by_name[name].goodput / counts[best],
            "by_no_overlap": by_name[name].goodput / none,
            "by_plain": by_name[name].goodput / plain,
        }
        for name in CHOOSING
    }
    # The heuristic is judged by the count it picks; how it fares while it is still choosing is its goodput.
    picked = counts.get(chosen[SPIN]["count"], by_name[SPIN].goodput)
    return {
        "goodput": {name: one.goodput for name, one in by_name.items()},
        "rates": {name: one.rates for name, one in by_name.items()},
        "calls": {name: by_name[name].calls for name in CHOOSING},
        "best_count": best,
        "chosen": chosen,
        "heuristic_of_best": picked / counts[best],
        "heuristic_is_near_best": picked >= LEAST_OF_BEST * counts[best],
        "gain_over_no_overlap": max(counts[best], chosen[AUTO]["goodput"]) / none,
        "gain_is_enough": max(counts[best], chosen[AUTO]["goodput"]) >= LEAST_GAIN * none,
    }


def show(record: Mapping[str, Any]) -> None:
    """Print the table, one row for each setting."""
    batches = record["batches"]
    names = list(next(iter(batches.values()))["goodput"])
    rows = []
    for name in names:
        row = [f"{name} micro-batches" if name.isdigit() and name != "1" else f"{name} micro-batch"]
        if not name.isdigit():
            row = [name]
        for part in batches.values():
            goodput = part["goodput"][name]
            mark = ""
            if name in CHOOSING:
                mark = f" ({part['chosen'][name]['count']})"
            elif name == str(part["best_count"]):
                mark = " *"
            row.append(f"{goodput:,.0f}{mark}")
            row.append(f"{goodput / part['goodput'][NO_OVERLAP]:.2f}x")
        rows.append(row)
    heads = ["", *(head for batch in batches for head in (f"{batch} requests", "by no overlap"))]
    tables.console.print(
        tables.plain_table("Tokens per second (* best count; in brackets the count chosen)", heads, rows)
    )
    for batch, part in batches.items():
        spin = part["chosen"][SPIN]
        set_by_hand = "which was not set by hand"
        if str(spin["count"]) in part["goodput"]:
            set_by_hand = f"which set by hand has {part['heuristic_of_best']:.3f} (at least {LEAST_OF_BEST})"
        tables.console.print(
            f"{batch} requests: SPIN's heuristic has {spin['by_best']:.3f} of the best count's goodput; it "
            f"mostly takes {spin['count']}, {set_by_hand}; "
            f"pipeline {part['gain_over_no_overlap']:.2f}x no overlap (at least {LEAST_GAIN})"
        )


def _deal(deck: Deck, count: int) -> list[Task]:
    """Tasks of all classes in turn."""
    share = -(-count // len(deck.domains))
    hands = [deck.deal(domain, share) for domain in deck.domains]
    return [task for turn in zip(*hands, strict=True) for task in turn][:count]


def _rotated(names: Sequence[str], number: int) -> list[str]:
    """Every round begins elsewhere, and every other goes backwards: no setting is always first."""
    start = number * len(names) // 3 % len(names)
    turned = [*names[start:], *names[:start]]
    return turned if number % 2 == 0 else turned[::-1]
