"""Tables of benchmark results for people."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from benchmarks.report import ClassReport, RunReport

# Fewer say nothing about one in a hundred.
FEW_REQUESTS = 100


def make_console() -> Console:
    """A console on standard output."""
    console = Console()
    # Logs and pipes have no width; the default of 80 columns would break the tables.
    return console if console.is_terminal else Console(width=132)


console = make_console()


def progress() -> Progress:
    """A progress bar with elapsed and remaining time; vanishes when done."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def number(value: float | None, digits: int = 1, unit: str = "") -> str:
    """A figure, or a dash for none."""
    return "-" if value is None else f"{value:,.{digits}f}{unit}"


def percent(value: float | None) -> str:
    """A share as a percentage, or a dash for none."""
    return "-" if value is None else f"{100.0 * value:.1f}%"


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table with its first column to the left and figures to the right."""
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(
            column, justify="left" if place == 0 else "right", overflow="fold", no_wrap=place == 0
        )
    for row in rows:
        # Names of classes, and texts of models and servers, may have brackets.
        table.add_row(*map(escape, row), end_section=row is rows[-1])
    return table


def _pair(first: float | None, second: float | None) -> str:
    return f"{number(first)} / {number(second)}"


def latency_table(classes: Sequence[ClassReport]) -> Table:
    """Latency and throughput by class."""
    rows = [
        [
            part.domain,
            f"{part.num_requests}" + (f" ({part.num_errors} failed)" if part.num_errors else ""),
            _pair(part.ttft.p50, part.ttft.p99),
            _pair(part.tpot.p50, part.tpot.p99),
            _pair(part.e2e.p50, part.e2e.p99),
            number(part.requests_per_s, 2),
            number(part.tokens_per_s),
        ]
        for part in classes
    ]
    heads = ["class", "requests", "TTFT ms", "TPOT ms", "end to end ms", "requests/s", "tokens/s"]
    return plain_table("Latency (p50 / p99) and throughput", heads, rows)


def objective_table(classes: Sequence[ClassReport], objectives: Mapping[str, str]) -> Table:
    """Attainment and both goodputs by class; `objectives` describes what each class asked for."""
    rows = [
        [
            part.domain,
            objectives.get(part.domain, ""),
            percent(part.attainment),
            percent(part.attainment_tpot),
            number(part.goodput_requests_per_s, 2),
            number(part.goodput_tokens_per_s),
        ]
        for part in classes
    ]
    heads = ["class", "objective", "attained", "TPOT attained", "goodput requests/s", "goodput tokens/s"]
    return plain_table("Objectives (goodput: all objectives met / mean TPOT met)", heads, rows)


def receipt_table(classes: Sequence[ClassReport]) -> Table | None:
    """Speculation by class as the server reported it; None if it reported none."""
    rows = []
    for part in classes:
        receipts = part.receipts
        if receipts is not None:
            drafters = ", ".join(f"{name} {count}" for name, count in receipts.drafters.items())
            rows.append(
                [
                    part.domain,
                    number(receipts.mean_acceptance_length, 2),
                    percent(receipts.acceptance_rate),
                    f"{receipts.num_drafted:,}",
                    f"{receipts.num_verified:,}",
                    f"{receipts.num_accepted:,}",
                    drafters or "-",
                ]
            )
    heads = [
        "class",
        "tokens/step",
        "accepted share",
        "drafted",
        "verified",
        "accepted",
        "accepted by drafter",
    ]
    return plain_table("Speculation (server's receipts)", heads, rows) if rows else None


def print_run(report: RunReport, objectives: Mapping[str, str]) -> None:
    """All tables of a run, and how much the load generator itself may have disturbed it."""
    classes = [*report.by_class, report.total]
    console.print(latency_table(classes))
    if report.total.num_requests < FEW_REQUESTS:
        console.print(f"Of fewer than {FEW_REQUESTS} requests p99 is little more than the slowest of them.")
    if report.total.num_with_slo:
        console.print(objective_table(classes, objectives))
    receipts = receipt_table(classes)
    if receipts is not None:
        console.print(receipts)
    console.print(
        f"Load generator: one process, {report.client_cpu_share:.2f} cores over {report.duration_s:.1f} s, "
        f"{number(report.client_parse_ms_p99, 2)} ms p99 spent per stream, "
        f"requests sent {number(report.send_lag_ms_p99, 1)} ms late (p99)."
    )
    print_errors(report.errors)


def print_errors(errors: Mapping[str, int]) -> None:
    """How often each error occurred; what a server says may have brackets, which are no markup."""
    for error, count in errors.items():
        console.print(f"{count} x {error}", style="red", markup=False, highlight=False)


def plain_data(value: Any) -> Any:
    """Without infinities and NaN, which JSON does not have (a score gap to an excluded token is infinite)."""
    if isinstance(value, Mapping):
        return {str(key): plain_data(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path | None, data: Mapping[str, Any]) -> None:
    """Write a result file if one was asked for."""
    if path is not None:
        path.write_text(json.dumps(plain_data(data), indent=1, default=str, allow_nan=False) + "\n")
        console.print(f"Wrote {path}.")
