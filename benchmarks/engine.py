"""`flotilla bench engine`: engines side by side on the same weights and prompts, interleaved in one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np

from benchmarks import environment, tables
from benchmarks.engine_under_test import EngineUnderTest, RunResult, Task
from benchmarks.greedy_differences import GreedyDifferences
from benchmarks.prompts import Prompt

ALL = "all"

T = TypeVar("T")


@dataclass(slots=True)
class Cell:
    """Rounds of one engine on one class at one concurrency."""

    engine: str
    domain: str
    concurrency: int
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    step_s: float = 0.0
    scheduler_s: float = 0.0

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each round."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]

    @property
    def median_rate(self) -> float:
        """Median over rounds of tokens per second."""
        return statistics.median(self.rates)

    @property
    def scheduler_share(self) -> float | None:
        """Selection and bookkeeping over step time; None for engines that do not say."""
        return self.scheduler_s / self.step_s if self.step_s > 0 else None

    def add(self, result: RunResult) -> None:
        """Take in a round's run."""
        self.seconds.append(result.seconds)
        self.tokens.append(result.num_tokens)
        self.step_s += result.step_s
        self.scheduler_s += result.scheduler_s


def total(cells: Sequence[Cell]) -> Cell:
    """All classes together: tokens and seconds summed round by round."""
    first = cells[0]
    return Cell(
        engine=first.engine,
        domain=ALL,
        concurrency=first.concurrency,
        seconds=[sum(part) for part in zip(*(cell.seconds for cell in cells), strict=True)],
        tokens=[sum(part) for part in zip(*(cell.tokens for cell in cells), strict=True)],
        step_s=sum(cell.step_s for cell in cells),
        scheduler_s=sum(cell.scheduler_s for cell in cells),
    )


class Deck:
    """Tasks by class, dealt in a shuffled order and none twice while others are left.

    Engines that cache prefixes would answer a repeated prompt from their cache, so every round gets
    prompts that no engine has seen.
    """

    def __init__(
        self, prompts: Sequence[Prompt], encoded: Sequence[list[int]], *, bound: int | None, seed: int
    ) -> None:
        self._tasks: dict[str, list[Task]] = {}
        for place in np.random.default_rng(seed).permutation(len(prompts)):
            prompt = prompts[place]
            most = min((limit for limit in (prompt.max_tokens, bound) if limit is not None), default=128)
            self._tasks.setdefault(prompt.domain, []).append(Task(prompt.domain, encoded[place], most))
        self._dealt = dict.fromkeys(self._tasks, 0)
        self.domains = sorted(self._tasks)

    def deal(self, domain: str, count: int) -> list[Task]:
        """The next `count` tasks of a class."""
        held, first = self._tasks[domain], self._dealt[domain]
        self._dealt[domain] += count
        return [held[(first + place) % len(held)] for place in range(count)]

    def warm_ups(self, count: int) -> list[Task]:
        """Short tasks to warm up with: prompts backwards, so that no cache learns a real one."""
        held = self._tasks[self.domains[0]]
        tasks = (held[place % len(held)] for place in range(count))
        return [Task(task.domain, task.tokens[::-1], min(16, task.max_tokens)) for task in tasks]

    @property
    def repeats(self) -> bool:
        """Whether any prompt was dealt twice."""
        return any(dealt > len(self._tasks[domain]) for domain, dealt in self._dealt.items())


class Orders:
    """In which order contenders take their turns: drawn anew each time, the same in every run.

    Where they only begin with another one each time, each always runs after the same one, and finds the
    caches, the clock and whatever else that one leaves.
    """

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def draw(self, contenders: Sequence[T]) -> list[T]:
        """The contenders in the next order."""
        return [contenders[place] for place in self._rng.permutation(len(contenders))]


@dataclass(slots=True)
class Comparison:
    """Everything measured.

    Attributes:
        differences: outputs of every engine but the reference, compared with the reference's.
        cells: by engine, class and concurrency.
    """

    differences: GreedyDifferences
    cells: dict[tuple[str, str, int], Cell] = field(default_factory=dict)

    def rate(self, engine: str, domain: str, concurrency: int) -> float | None:
        """Median tokens per second, if measured."""
        cell = self.cells.get((engine, domain, concurrency))
        return None if cell is None else cell.median_rate

    def ratio(self, engine: str, other: str, domain: str, concurrency: int) -> float | None:
        """Ratio of the medians of two engines, if both were measured."""
        own, base = self.rate(engine, domain, concurrency), self.rate(other, domain, concurrency)
        return own / base if own is not None and base else None


def compare(
    engines: Sequence[EngineUnderTest],
    deck: Deck,
    *,
    concurrencies: Sequence[int],
    per_domain: int,
    rounds: int,
    end_tokens: Sequence[int],
    reference: str,
    before_run: Callable[[], None] = lambda: None,
    after_warm_ups: Callable[[], object] = lambda: None,
    after_round: Callable[[Comparison], object] = lambda comparison: None,
) -> Comparison:
    """Measure every engine on every class and concurrency, in turns.

    A run has `per_domain` prompts, or as many as there are streams if that is more. `reference` names the
    engine whose outputs the others' are compared with. `before_run` is called before each run,
    `after_warm_ups` once before the first that counts, and `after_round` with what is measured so far, all
    classes together included, after each round but the last.
    """
    comparison = Comparison(GreedyDifferences(end_tokens))
    able = {
        concurrency: [e for e in engines if e.max_concurrency is None or concurrency <= e.max_concurrency]
        for concurrency in concurrencies
    }
    num_runs = sum(map(len, able.values()))
    with tables.progress() as bar:
        task = bar.add_task("Warming up", total=num_runs * (1 + rounds * len(deck.domains)))
        for concurrency in concurrencies:
            few = deck.warm_ups(concurrency)
            for engine in able[concurrency]:
                before_run()
                engine.run(few, concurrency)
                bar.advance(task)
        after_warm_ups()
        orders = Orders()
        for number in range(rounds):
            for concurrency in concurrencies:
                for domain in deck.domains:
                    held = deck.deal(domain, max(per_domain, concurrency))
                    outputs: dict[str, list[list[int]]] = {}
                    for engine in orders.draw(able[concurrency]):
                        text = f"Round {number + 1}/{rounds}: {engine.name}, {domain}, {concurrency} at once"
                        bar.update(task, description=text)
                        before_run()
                        result = engine.run(held, concurrency)
                        key = (engine.name, domain, concurrency)
                        comparison.cells.setdefault(key, Cell(*key)).add(result)
                        outputs[engine.name] = result.outputs
                        bar.advance(task)
                    for name, found in outputs.items():
                        if reference in outputs and name != reference:  # equal to itself, which says nothing
                            comparison.differences.compare(name, held, outputs[reference], found)
            _add_totals(comparison, engines, deck.domains, concurrencies)
            if number + 1 < rounds:
                after_round(comparison)
    return comparison


def _add_totals(
    comparison: Comparison,
    engines: Sequence[EngineUnderTest],
    domains: Sequence[str],
    concurrencies: Sequence[int],
) -> None:
    for concurrency in concurrencies:
        for engine in engines:
            parts = [comparison.cells.get((engine.name, domain, concurrency)) for domain in domains]
            measured = [part for part in parts if part is not None]
            if len(measured) > 1:
                comparison.cells[engine.name, ALL, concurrency] = total(measured)


def print_comparison(
    comparison: Comparison, engines: Sequence[str], own: str, baselines: Sequence[str]
) -> None:
    """One table for each concurrency: tokens per second, and `own`'s ratio to every engine."""
    concurrencies = sorted({key[2] for key in comparison.cells})
    for concurrency in concurrencies:
        domains = sorted({key[1] for key in comparison.cells} - {ALL})
        domains += [ALL] if len(domains) > 1 else []
        rows = []
        for engine in engines:
            if (engine, domains[0], concurrency) not in comparison.cells:
                continue
            row = [engine]
            for domain in domains:
                rate = comparison.rate(engine, domain, concurrency)
                row.append(tables.number(rate))
            for base in baselines:
                row.append(tables.number(comparison.ratio(engine, base, domains[-1], concurrency), 2, "x"))
            row.append(tables.number(comparison.ratio(own, engine, domains[-1], concurrency), 2, "x"))
            share = comparison.cells[engine, domains[-1], concurrency].scheduler_share
            row.append(tables.percent(share))
            rows.append(row)
        heads = ["tokens/s", *domains, *(f"vs {base}" for base in baselines), f"{own} vs it", "scheduler"]
        tables.console.print(tables.plain_table(f"{concurrency} at once", heads, rows))


def to_json(comparison: Comparison, own: str, baselines: Sequence[str]) -> dict[str, Any]:
    """The record for a JSON file; ratios are of medians, with the spread of single rounds."""
    cells = []
    for (engine, domain, concurrency), cell in comparison.cells.items():
        ratios = {}
        for base in baselines:
            other = comparison.cells.get((base, domain, concurrency))
            if other is not None:
                singles = [a / b for a, b in zip(cell.rates, other.rates, strict=True)]
                ratios[base] = {
                    "of_medians": comparison.ratio(engine, base, domain, concurrency),
                    "min": min(singles),
                    "max": max(singles),
                }
        cells.append(
            asdict(cell)
            | {
                "tokens_per_s": cell.median_rate,
                "scheduler_share": cell.scheduler_share,
                "ratio_to": ratios,
                f"{own} / this": comparison.ratio(own, engine, domain, concurrency),
            }
        )
    return {
        "benchmark": "engine",
        "environment": environment.describe(),
        "cells": cells,
        "outputs_compared": comparison.differences.num_outputs,
        "outputs_different": comparison.differences.num_different,
    }
