"""`flotilla bench decomposition`: what a verify step costs with ragged contexts padded in different ways.

SPIN's figure 12, with a second baseline that it does not have: segments grouped by shape.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import decomposition_lengths, environment, tables
from benchmarks.decomposition_attention import METHODS
from benchmarks.decomposition_fit import fit_costs
from benchmarks.decomposition_setting import SHAPES, Shape, make_runner, make_segments
from engine.process import tune_process


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure.

    Attributes:
        batches: requests of a verify step.
        num_nodes: rows of each request: the nodes of its draft tree, the root included.
        lengths: file of context lengths; None draws them from a lognormal distribution.
        draws: batches drawn of each size.
        repeats: measurements of each, interleaved between the methods.
        seed: of the lengths, trees and weights.
    """

    batches: tuple[int, ...] = (8, 16, 32)
    num_nodes: int = 5
    lengths: Path | None = None
    draws: int = 3
    repeats: int = 7
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """One way of padding at one batch size: means over the draws, each a median of the repeats.

    Attributes:
        shape: the model.
        batch: requests.
        method: how keys are padded.
        key_tokens: keys without padding.
        padded_tokens: keys of padding.
        removed: share of one rectangle's padding that is not there.
        step_ms: processor time of the forward: planning, all layers, logits of all rows.
        plan_ms: processor time of planning alone.
        speedup: one rectangle's `step_ms` over this.
    """

    shape: str
    batch: int
    method: str
    key_tokens: float
    padded_tokens: float
    removed: float
    step_ms: float
    plan_ms: float
    speedup: float


def measure(shape: Shape, options: Options) -> Iterator[list[Measured]]:
    """All methods at each batch size in turn."""
    draw = decomposition_lengths.source(options.lengths)
    rng = np.random.default_rng(options.seed)
    batches = {n: [draw(rng, n) for _ in range(options.draws)] for n in options.batches}
    most = max(sum(c) + len(c) * options.num_nodes for drawn in batches.values() for c in drawn)
    runner, attention = make_runner(shape, most, options.seed)
    for batch, drawn in batches.items():
        sums: dict[str, list[tuple[float, ...]]] = {method: [] for method in METHODS}
        for contexts in drawn:
            segments = make_segments(rng, contexts, options.num_nodes)
            keep = np.arange(batch * options.num_nodes, dtype=np.int32)
            times: dict[str, list[tuple[float, float]]] = {method: [] for method in METHODS}
            for repeat in range(options.repeats + 1):
                for method in METHODS:
                    attention.method = method
                    begun = time.thread_time()
                    attention.plan(segments)
                    planned = time.thread_time()
                    runner.forward(segments, keep)
                    if repeat:  # the first is warm-up
                        ended = time.thread_time()
                        times[method].append((ended - planned, planned - begun))
            for method in METHODS:
                attention.method = method
                keys = attention.plan(segments).key_tokens
                step_s, plan_s = np.median(times[method], axis=0)
                sums[method].append((keys.real, keys.padding, step_s * 1e3, plan_s * 1e3))
        means = {method: np.mean(rows, axis=0) for method, rows in sums.items()}
        yield [
            Measured(
                shape=shape.name,
                batch=batch,
                method=method,
                key_tokens=float(real),
                padded_tokens=float(padding),
                removed=1.0 - float(padding / max(1.0, means[METHODS[0]][1])),
                step_ms=float(step_ms),
                plan_ms=float(plan_ms),
                speedup=float(means[METHODS[0]][2] / step_ms),
            )
            for method, (real, padding, step_ms, plan_ms) in means.items()
        ]


def print_measured(found: Sequence[Measured]) -> None:
    """One table per model."""
    heads = ["", "keys", "padding", "removed", "verify step ms", "of it planning", "against one rectangle"]
    for shape in dict.fromkeys(row.shape for row in found):
        rows = [
            [
                f"{row.batch} requests, {row.method}",
                tables.number(row.key_tokens, 0),
                tables.number(row.padded_tokens, 0),
                tables.percent(row.removed),
                tables.number(row.step_ms, 1),
                tables.number(row.plan_ms, 2),
                tables.number(row.speedup, 2, "x"),
            ]
            for row in found
            if row.shape == shape
        ]
        tables.console.print(tables.plain_table(shape, heads, rows))


def run(options: Options) -> dict[str, Any]:
    """Measure and print everything; the record for the result file.

    Raises:
        ValueError: if the file of lengths cannot be used.
        OSError: if it cannot be read.
    """
    tune_process()
    before = environment.describe()
    found: list[Measured] = []
    with tables.progress() as bar:
        task = bar.add_task("verify steps", total=len(SHAPES) * len(options.batches))
        for shape in SHAPES:
            for rows in measure(shape, options):
                found += rows
                bar.advance(task)
    print_measured(found)
    fits = fit_costs(SHAPES, options.seed)
    return {
        "environment": before,
        "options": asdict(options),
        "steps": [asdict(row) for row in found],
        "costs": fits,
    }
