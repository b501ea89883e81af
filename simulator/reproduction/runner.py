"""Runs what figures need, each point once, and keeps the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path

from simulator.process_pool import process_pool
from simulator.reproduction.cache import Store
from simulator.reproduction.claims import Results
from simulator.reproduction.setting import Setting, figures_of, run
from simulator.reproduction.spec import Figure, Value


@dataclass(frozen=True, slots=True)
class Scope:
    """How much of figures is run.

    Attributes:
        seeds: of every point. 0 is left out: settings of our policy were chosen with it.
        quick: shorter arrivals.
        values: of the axis; all if empty.
        data: folder of recorded data, if there is one.
        stored: nothing is run; what the store lacks in any seed is left out.
    """

    seeds: tuple[int, ...] = (1, 2, 3)
    quick: bool = False
    values: tuple[Value, ...] = ()
    data: Path | None = None
    stored: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a figure."""

    figure: str
    label: str
    value: Value
    seed: int
    setting: Setting


def points(figure: Figure, scope: Scope) -> list[Point]:
    """All runs of a figure."""
    seconds = figure.quick_seconds if scope.quick else None
    return [
        Point(figure.name, label, value, seed, figure.setting(label, value, seconds))
        for seed in scope.seeds
        for value in figure.points
        if not scope.values or value in scope.values
        for label in figure.series
    ]


def reproduce(
    figures: Sequence[Figure],
    scope: Scope,
    store: Store,
    processes: int = 1,
    started: Callable[[int, int], None] | None = None,
    done: Callable[[Point], None] | None = None,
) -> dict[str, Results]:
    """Run what the store lacks; interrupted, it goes on from there the next time.

    Args:
        figures: to run.
        scope: how much of them.
        store: of results.
        processes: at once.
        started: told how many different runs there are, and how many of them the store has.
        done: told of each that ends.
    """
    wanted = [point for figure in figures for point in points(figure, scope)]
    missing: dict[str, Point] = {}
    held: dict[str, dict[str, float]] = {}
    of_point = [(point, store.key(point.setting, point.seed)) for point in wanted]
    for point, key in of_point:
        if key in held or key in missing:
            continue
        found = store.get(key)
        if found is None:
            missing[key] = point
        else:
            held[key] = found
    if scope.stored:
        missing.clear()
    if started is not None:
        started(len(held) + len(missing), len(held))
    for key, figures_here in _run_all(missing, scope, processes):
        store.put(key, figures_here)
        held[key] = figures_here
        if done is not None:
            done(missing[key])
    results = {}
    for figure in figures:
        runs: dict[tuple[str, Value], list[dict[str, float]]] = {}
        for point, key in of_point:
            if point.figure == figure.name and key in held:
                runs.setdefault((point.label, point.value), []).append(held[key])
        whole = {place: of_seeds for place, of_seeds in runs.items() if len(of_seeds) == len(scope.seeds)}
        results[figure.name] = Results(figure, whole)
    return results


def _run_all(
    missing: dict[str, Point], scope: Scope, processes: int
) -> Iterable[tuple[str, dict[str, float]]]:
    if processes <= 1 or len(missing) <= 1:
        for key, point in missing.items():
            yield key, _run(point.setting, point.seed, scope.data)
        return
    with process_pool(processes) as pool:
        futures = {
            pool.submit(_run, point.setting, point.seed, scope.data): key for key, point in missing.items()
        }
        for future in as_completed(futures):
            yield futures[future], future.result()


def _run(setting: Setting, seed: int, data: Path | None) -> dict[str, float]:
    return figures_of(run(setting, seed, data))
