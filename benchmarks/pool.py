"""`flotilla bench pool`: a heterogeneous pool beside each of its drafters alone (SPIN, figures 10 and 11)."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import demo, environment, tables
from benchmarks import prompts as prompt_sources
from benchmarks.engine import Deck, Orders
from benchmarks.engine_under_test import Task
from benchmarks.greedy_differences import GreedyDifferences, print_differences
from benchmarks.pool_cell import PoolCell, Served
from benchmarks.pool_contenders import ALONE, ORACLE, PLAIN, POOL, Contender, contenders
from benchmarks.transformers_engine import Reference
from cluster.config import FlotillaConfig
from cluster.stream_messages import Speculation

SELECTORS = ("lbss", "greedy-length", "epsilon-greedy", "flotilla")
OURS, PAPER = f"{POOL}flotilla", f"{POOL}lbss"


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """What `flotilla bench pool` was asked to do; see its help for the meaning of each."""

    config: Path | None = None
    source: str = "zoo"
    drafters: tuple[str, ...] = ()
    selectors: tuple[str, ...] = SELECTORS
    concurrency: int = 8
    per_domain: int = 6
    rounds: int = 3
    warm_ups: int = 1
    max_tokens: int | None = None
    fixed_depth: int | None = None
    seed: int = 0


@dataclass(slots=True)
class Rounds:
    """All rounds of one contender.

    Attributes:
        label: of the contender.
        seconds, tokens, steps, drafted, verified, accepted: of each round, over all its requests; a step
            here is one verify step of one request.
        switches: of each round.
        chosen: accepted tokens by domain and drafter, over all rounds.
    """

    label: str
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    switches: list[float] = field(default_factory=list)
    chosen: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, tasks: Sequence[Task], served: Sequence[Served], seconds: float, switches: float) -> None:
        """Take in a round."""
        self.seconds.append(seconds)
        self.tokens.append(sum(len(one.tokens) for one in served))
        receipts = [one.receipt for one in served]
        self.steps.append(sum(receipt.num_steps for receipt in receipts))
        self.drafted.append(sum(receipt.num_drafted for receipt in receipts))
        self.verified.append(sum(receipt.num_verified for receipt in receipts))
        self.accepted.append(sum(receipt.num_accepted for receipt in receipts))
        self.switches.append(switches)
        for task, receipt in zip(tasks, receipts, strict=True):
            self.chosen.setdefault(task.domain, Counter()).update(receipt.drafters)

    @property
    def goodput(self) -> list[float]:
        """Tokens per second of each round (SPIN's goodput)."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]

    @property
    def median_goodput(self) -> float:
        """Median over rounds."""
        return statistics.median(self.goodput)

    @property
    def tokens_per_step(self) -> float:
        """Tokens a verify step brings a request, on average."""
        return sum(self.tokens) / max(1, sum(self.steps))


@dataclass(slots=True)
class PoolComparison:
    """Everything measured.

    Attributes:
        rounds: by contender's label, in order.
        differences: outputs compared with those without speculation.
        best: by domain, how often each drafter alone (or none) was fastest on a prompt.
    """

    rounds: dict[str, Rounds]
    differences: GreedyDifferences
    best: dict[str, Counter[str]] = field(default_factory=dict)


def mixed(deck: Deck, per_domain: int, rng: np.random.Generator) -> list[Task]:
    """Prompts of all domains in random order."""
    tasks = [task for domain in deck.domains for task in deck.deal(domain, per_domain)]
    return [tasks[place] for place in rng.permutation(len(tasks))]


def fastest_alone(number: int, alone: dict[str, list[Served]]) -> str:
    """The drafter that served the prompt of this number at the lowest time per token; empty for none."""
    times = {
        drafter: served[number].seconds / max(1, len(served[number].tokens))
        for drafter, served in alone.items()
    }
    return min(times, key=lambda drafter: (times[drafter], drafter))


def compare(
    cell: PoolCell, deck: Deck, entered: Sequence[Contender], options: PoolOptions, end_tokens: Sequence[int]
) -> PoolComparison:
    """Serve each round's prompts by every contender, in another order each round."""
    comparison = PoolComparison(
        {one.label: Rounds(one.label) for one in entered}, GreedyDifferences(end_tokens)
    )
    rng, orders = np.random.default_rng(options.seed), Orders()
    total = options.warm_ups + options.rounds
    # The oracle needs the others' figures, so it is last in every round.
    turning = [one for one in entered if not one.by_prompt]
    last = [one for one in entered if one.by_prompt]
    with tables.progress() as bar:
        task_id = bar.add_task("Serving", total=total * len(entered))
        for number in range(total):
            tasks = mixed(deck, options.per_domain, rng)
            alone: dict[str, list[Served]] = {}
            outputs: dict[str, list[Served]] = {}
            for contender in [*orders.draw(turning), *last]:
                bar.update(task_id, description=f"Round {number + 1}/{total}: {contender.label}")
                wishes = _wishes(contender, alone, len(tasks))
                cell.set_selector(dict(contender.selector))
                before = cell.stats()["switches"]
                seconds, served = cell.serve(tasks, wishes, options.concurrency)
                switches = cell.stats()["switches"] - before
                outputs[contender.label] = served
                if contender.label.startswith(ALONE):
                    alone[contender.drafters[0]] = served
                elif contender.label == PLAIN:
                    alone[""] = served
                if number >= options.warm_ups:
                    comparison.rounds[contender.label].add(tasks, served, seconds, switches)
                bar.advance(task_id)
            if number >= options.warm_ups:
                for place, task in enumerate(tasks):
                    winner = fastest_alone(place, alone) or PLAIN
                    comparison.best.setdefault(task.domain, Counter())[winner] += 1
            expected = [one.tokens for one in outputs.pop(PLAIN)]
            for label, served in outputs.items():
                comparison.differences.compare(label, tasks, expected, [one.tokens for one in served])
    return comparison


def _wishes(contender: Contender, alone: dict[str, list[Served]], count: int) -> list[Speculation]:
    if not contender.speculates:
        return [Speculation(mode="off")] * count
    if not contender.by_prompt:
        return [Speculation(drafters=contender.drafters)] * count
    winners = [fastest_alone(place, alone) for place in range(count)]
    return [Speculation(drafters=(name,)) if name else Speculation(mode="off") for name in winners]


def best_alone(comparison: PoolComparison) -> Rounds:
    """The drafter that alone has the highest goodput over the mix."""
    alone = [rounds for label, rounds in comparison.rounds.items() if label.startswith(ALONE)]
    return max(alone, key=lambda rounds: rounds.median_goodput)


def ratios(comparison: PoolComparison) -> dict[str, dict[str, float]]:
    """Goodput of each contender over that of the best single drafter, of no speculation and of the oracle.

    Ratios are medians over rounds of the ratios within a round, in which all served the same prompts.
    """
    single = best_alone(comparison)
    found: dict[str, dict[str, float]] = {}
    for label, rounds in comparison.rounds.items():
        bases = {"best single": single, PLAIN: comparison.rounds[PLAIN], ORACLE: comparison.rounds[ORACLE]}
        found[label] = {
            name: statistics.median(
                own / other for own, other in zip(rounds.goodput, base.goodput, strict=True)
            )
            for name, base in bases.items()
        }
    return found


def print_comparison(comparison: PoolComparison) -> None:
    """The table of goodput, and who was the best choice on how many prompts."""
    found = ratios(comparison)
    rows = [
        [
            label,
            tables.number(rounds.median_goodput),
            tables.number(found[label][PLAIN], 2, "x"),
            tables.number(found[label]["best single"], 2, "x"),
            tables.number(found[label][ORACLE], 2, "x"),
            tables.number(rounds.tokens_per_step, 2),
            tables.percent(sum(rounds.accepted) / sum(rounds.verified) if sum(rounds.verified) else None),
            tables.number(statistics.median(rounds.switches), 0),
        ]
        for label, rounds in comparison.rounds.items()
    ]
    heads = [
        "contender",
        "tokens/s",
        f"vs {PLAIN}",
        "vs best single",
        "vs oracle",
        "tokens/step",
        "accepted",
        "switches",
    ]
    tables.console.print(tables.plain_table("Goodput of a mixed load", heads, rows))
    drafters = sorted({name for counts in comparison.best.values() for name in counts})
    rows = [
        [domain, *(tables.percent(counts[name] / counts.total()) for name in drafters)]
        for domain, counts in sorted(comparison.best.items())
    ]
    tables.console.print(tables.plain_table("Fastest alone, share of prompts", ["domain", *drafters], rows))


def run(options: PoolOptions) -> dict[str, Any]:
    """Run the comparison, print its tables and return its JSON record."""
    config = demo.every_kind() if options.config is None else demo.load_config(options.config)
    if options.fixed_depth is not None:
        config = demo.changed(config, policy={"name": "fixed", "fixed_depth": options.fixed_depth})
    # Before the cell is started: it would say so at that selector's turn.
    for selector in options.selectors:
        demo.changed(config, selector={"name": selector})
    names = [drafter.name for drafter in config.drafters]
    unknown = sorted(set(options.drafters) - set(names))
    if unknown:
        raise ValueError(f"no drafter {', '.join(unknown)}; there are {', '.join(names)}")
    config = _restricted(config, options.drafters)
    entered = contenders(options.drafters or names, options.selectors)
    reference = Reference(demo.directory(config.target.path), config.target.dtype, config.target.quantization)
    loaded = prompt_sources.load(options.source)
    encoded = [reference.encode(prompt) for prompt in loaded]
    deck = Deck(loaded, encoded, bound=options.max_tokens, seed=options.seed)
    with tables.console.status("Starting the cell..."):
        cell = PoolCell(config, reference.end_tokens)
    try:
        comparison = compare(cell, deck, entered, options, reference.end_tokens)
    finally:
        cell.close()
    tables.console.print(
        f"{len(deck.domains)} domains x {options.per_domain} prompts a round, {options.concurrency} at once, "
        f"medians of {options.rounds} rounds after {options.warm_ups} to learn in; "
        f"policy `{config.policy.name}`."
    )
    print_comparison(comparison)
    differences = comparison.differences
    num_outputs = sum(differences.num_outputs.values())
    judged = differences.judge(lambda: reference)
    print_differences(judged, num_outputs, "those without speculation")
    return {
        "benchmark": "pool",
        "environment": environment.describe(),
        "options": asdict(options),
        **environment.of_cell(config, __name__),
        "contenders": [
            asdict(rounds) | {"goodput": rounds.goodput, "tokens_per_step": rounds.tokens_per_step}
            for rounds in comparison.rounds.values()
        ],
        "ratios": ratios(comparison),
        "best_single": best_alone(comparison).label,
        "fastest_alone": comparison.best,
        "outputs_compared": num_outputs,
        "outputs_different": sum(differences.num_different.values()),
        "differences": judged,
        "prompts_repeated": deck.repeats,
    }


def _restricted(config: FlotillaConfig, drafters: Sequence[str]) -> FlotillaConfig:
    if not drafters:
        return config
    kept = tuple(drafter for drafter in config.drafters if drafter.name in drafters)
    return config.model_copy(update={"drafters": kept})
