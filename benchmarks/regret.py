"""Regret of the selectors on SPIN's bandit: the goodput each loses to the best matching, slot by slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

from benchmarks import environment
from benchmarks.regret_bandit import Float64, draw, shifted
from benchmarks.regret_run import Losses, Simulation
from benchmarks.tables import console, plain_table
from selector.registry import make_selector

SELECTORS = ("flotilla", "lbss", "epsilon-greedy", "greedy-length", "fixed")
STATIC = ("greedy-length", "fixed")
# Where cumulative regret is recorded: so many points in each doubling of slots.
POINTS_PER_DOUBLING = 4
# Growth is fitted to the ends of LBSS's epochs from this slot on; before, exploration is most of the time.
TAIL_SLOT = 1 << 12
NUM_RESAMPLES = 2000
# A selector has adapted when in so many slots it loses less than this share of the goodput there is.
ADAPTED_SLOTS, ADAPTED_SHARE = 256, 0.02


@dataclass(frozen=True)
class RegretOptions:
    """What to simulate.

    Attributes:
        num_slots: of the stationary bandit.
        num_shift_slots: of the one that changes halfway.
        seeds: an instance and its noise each.
        alpha, beta: of LBSS.
        epsilon: of epsilon-greedy.
    """

    num_slots: int = 1 << 17
    num_shift_slots: int = 1 << 15
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    alpha: int = 128
    beta: int = 8
    epsilon: float = 0.2


def run(options: RegretOptions, report: Callable[[str], None] = console.print) -> dict[str, Any]:
    """Simulate everything, print the tables, and return all figures."""
    stationary = _simulate(options, options.num_slots, report, shifts=False)
    shift = _simulate(options, options.num_shift_slots, report, shifts=True)
    grid = _grid(options.num_slots)
    ends = _epoch_ends(options)
    record: dict[str, Any] = {
        "environment": environment.describe(),
        "settings": asdict(options),
        "unit": "tokens that the best matching brings more, summed over requests and slots",
        "slots": grid,
        "stationary": {
            name: _stationary_figures(runs, grid, is_ours=name == "flotilla")
            for name, runs in stationary.items()
        },
        "lbss_growth": _growth(stationary["lbss"], ends),
        "shift": {
            "slot": options.num_shift_slots // 2,
            "slots": _grid_after(options.num_shift_slots),
            "selectors": {name: _shift_figures(runs) for name, runs in shift.items()},
        },
    }
    _print(record)
    return record


def _simulate(
    options: RegretOptions, num_slots: int, report: Callable[[str], None], *, shifts: bool
) -> dict[str, list[tuple[Losses, float]]]:
    """Losses by selector and seed, with the tokens the best matching brings in a slot at the end."""
    found: dict[str, list[tuple[Losses, float]]] = {name: [] for name in SELECTORS}
    for seed in options.seeds:
        rng = np.random.default_rng(seed)
        before = draw(rng)
        phases = [before, shifted(before, rng)] if shifts else [before]
        for name in SELECTORS:
            selector = make_selector(
                name, alpha=options.alpha, beta=options.beta, epsilon=options.epsilon, seed=seed
            )
            simulation = Simulation(selector, phases, num_slots, seed, is_static=name in STATIC)
            losses = simulation.run()
            found[name].append((losses, phases[-1].optimum * phases[-1].slot_s))
        report(f"{'shift' if shifts else 'stationary'}: seed {seed} done")
    return found


def _stationary_figures(
    runs: Sequence[tuple[Losses, float]], grid: Sequence[int], *, is_ours: bool
) -> dict[str, Any]:
    at = np.array(grid) - 1
    goodput = np.array([np.cumsum(losses.goodput)[at] for losses, _ in runs])
    switching = np.array([np.cumsum(losses.switching)[at] for losses, _ in runs])
    figures: dict[str, Any] = {
        "regret": _curve(goodput),
        "regret_with_switching": _curve(goodput + switching),
        "exponent": _exponent(np.array(grid), goodput.mean(axis=0)),
        "num_switches": [losses.num_switches for losses, _ in runs],
    }
    if is_ours:
        reading = np.array([np.cumsum(losses.reading)[at] for losses, _ in runs])
        figures["regret_with_switching_and_reading"] = _curve(goodput + switching + reading)
        figures["share_of_idle_time_read"] = [losses.read_s / losses.idle_s for losses, _ in runs]
    return figures


def _curve(values: Float64) -> dict[str, Any]:
    """Mean over seeds (rows) at every point, with 95 % percentile bootstrap intervals over seeds."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(values), size=(NUM_RESAMPLES, len(values)))
    low, high = np.percentile(values[drawn].mean(axis=1), (2.5, 97.5), axis=0)
    mean = values.mean(axis=0)
    return {
        "mean": mean.tolist(),
        "low": low.tolist(),
        "high": high.tolist(),
        "final": {"mean": float(mean[-1]), "interval": [float(low[-1]), float(high[-1])]},
        "final_by_seed": values[:, -1].tolist(),
    }


def _exponent(slots: Sequence[int] | Float64, regret: Float64) -> float | None:
    """p of regret ~ T^p by least squares on logarithms, over the tail."""
    slots = np.asarray(slots, dtype=np.float64)
    tail = (slots >= TAIL_SLOT) & (regret > 0.0)
    if tail.sum() < 2:
        return None
    return float(np.polyfit(np.log(slots[tail]), np.log(regret[tail]), 1)[0])


def _growth(runs: Sequence[tuple[Losses, float]], ends: Sequence[int]) -> dict[str, Any]:
    """How LBSS's regret grows from the end of one epoch to the next, and in theory's terms, O(log2 T)."""
    at = np.array(ends, dtype=np.int64)  # of so few slots that no epoch ends there are none
    growth: dict[str, Any] = {"epoch_ends": list(ends)}
    for label, parts in (("regret", ("goodput",)), ("regret_with_switching", ("goodput", "switching"))):
        curves = [[np.cumsum(getattr(losses, part))[at - 1] for part in parts] for losses, _ in runs]
        mean = np.array(curves).sum(axis=1).mean(axis=0)
        entry: dict[str, Any] = {"mean": mean.tolist(), "over_log2_slots": (mean / np.log2(at)).tolist()}
        tail = at >= TAIL_SLOT
        if tail.sum() >= 3:
            fit = stats.linregress(np.log2(at[tail]), mean[tail])
            power = stats.linregress(np.log(at[tail]), np.log(mean[tail]))
            entry |= {
                "exponent": float(power.slope),
                "tokens_per_doubling": float(fit.slope),
                "r_squared_in_log2_slots": float(fit.rvalue**2),
            }
        growth[label] = entry
    return growth


def _shift_figures(runs: Sequence[tuple[Losses, float]]) -> dict[str, Any]:
    after, adapted = [], []
    for losses, tokens_per_slot in runs:
        half = len(losses.goodput) // 2
        lost = losses.goodput[half:]
        after.append(np.cumsum(lost)[np.array(_grid_after(len(losses.goodput))) - 1])
        # Mean loss over the slots that follow each slot.
        sums = np.concatenate([[0.0], np.cumsum(lost)])
        means = (sums[ADAPTED_SLOTS:] - sums[:-ADAPTED_SLOTS]) / ADAPTED_SLOTS
        settled = np.flatnonzero(means < ADAPTED_SHARE * tokens_per_slot)
        adapted.append(int(settled[0]) if len(settled) else None)
    return {"regret_after": _curve(np.array(after)), "slots_to_adapt": adapted}


def _grid(num_slots: int) -> list[int]:
    """Slots at equal distances on a logarithmic scale, the last one included."""
    steps = np.arange(0, np.log2(num_slots) + 1e-9, 1 / POINTS_PER_DOUBLING)
    return sorted({round(2.0**step) for step in steps} | {num_slots})


def _grid_after(num_slots: int) -> list[int]:
    return _grid(num_slots - num_slots // 2)


def _epoch_ends(options: RegretOptions) -> list[int]:
    """Slots after which LBSS's epochs are over."""
    ends, slot, epoch = [], 0, 1
    while (slot := slot + options.alpha + 2**epoch) <= options.num_slots:
        ends.append(slot)
        epoch += 1
    return ends


def _print(record: Mapping[str, Any]) -> None:
    rows = []
    for name, figures in record["stationary"].items():
        shift = record["shift"]["selectors"][name]
        slots = [number for number in shift["slots_to_adapt"] if number is not None]
        adapted = f"{np.median(slots):,.0f}" if len(slots) == len(shift["slots_to_adapt"]) else "not all"
        exponent = figures["exponent"]
        rows.append(
            [
                name,
                _interval(figures["regret"]),
                _interval(figures["regret_with_switching"]),
                "-" if exponent is None else f"{exponent:.2f}",
                _interval(shift["regret_after"]),
                adapted,
            ]
        )
        if "regret_with_switching_and_reading" in figures:
            charged = _interval(figures["regret_with_switching_and_reading"])
            rows.append([f"{name}, reading charged", "", charged, "", "", ""])
    heads = ["selector", "regret", "with switching", "exponent", "after the shift", "slots to adapt"]
    slots = record["settings"]["num_slots"]
    console.print(
        plain_table(f"Regret in tokens after {slots:,} slots (95 % intervals over seeds)", heads, rows)
    )
    for label, name in (("regret", "LBSS"), ("regret_with_switching", "LBSS with switching cost")):
        growth = record["lbss_growth"][label]
        if "exponent" in growth:
            console.print(
                f"{name}, epoch ends from slot {TAIL_SLOT:,} on: T^{growth['exponent']:.2f}; against log2 T "
                f"a line of {growth['tokens_per_doubling']:,.0f} tokens per doubling, "
                f"R2 {growth['r_squared_in_log2_slots']:.4f}"
            )


def _interval(curve: Mapping[str, Any]) -> str:
    low, high = curve["final"]["interval"]
    return f"{curve['final']['mean']:,.0f} [{low:,.0f}, {high:,.0f}]"
