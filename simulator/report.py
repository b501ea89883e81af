"""Results of simulated runs as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from simulator.metrics import ALL, RunResult


def by_class(results: Sequence[RunResult], title: str) -> Table:
    """One row per system and class: attainment, goodput (tokens per second), mean and p99 latencies in ms."""
    table = Table(title=f"{title} (goodput in tokens/s, times in ms)")
    table.add_column("system", overflow="fold")
    table.add_column("class", overflow="fold")
    for name in ("n", "attained", "goodput", "TPOT", "p99", "TTFT", "tok/step", "accept"):
        table.add_column(name, justify="right", overflow="fold")
    for result in results:
        names = sorted(result.classes, key=lambda name: (name == ALL, name))
        for name in names:
            one = result.classes[name]
            table.add_row(
                result.system if name == names[0] else "",
                name,
                str(one.num_requests),
                f"{one.attainment:.1%}",
                f"{one.goodput_tokens_s:.0f}",
                _number(one.tpot_ms.mean),
                _number(one.tpot_ms.p99),
                _number(one.ttft_ms.mean, 0),
                f"{one.accepted_per_step:.2f}",
                "" if one.acceptance is None else f"{one.acceptance:.0%}",
                end_section=name == ALL,
            )
    return table


def of_steps(results: Sequence[RunResult]) -> Table:
    """One row per system: where the time of a decode iteration goes."""
    table = Table(title="A decode iteration (times in ms)")
    table.add_column("system", overflow="fold")
    for name in ("ms", "draft", "verify", "other", "tok/s", "preempted", "refused", "cut off", "unfinished"):
        table.add_column(name, justify="right")
    for result in results:
        steps = result.steps
        table.add_row(
            result.system,
            f"{steps.step_ms:.1f}",
            f"{steps.draft_ms:.1f}",
            f"{steps.verify_ms:.1f}",
            f"{steps.other_ms:.1f}",
            f"{steps.goodput_tokens_s:.0f}",
            str(result.num_preemptions),
            str(result.num_rejected),
            str(result.num_cut),
            str(result.num_unfinished),
        )
    return table


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"
