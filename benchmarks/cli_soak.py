"""`flotilla bench soak`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cli_common import (
    Cells,
    DistinctMaxTokens,
    FrontEnds,
    JsonFile,
    LoadShare,
    NumDistinct,
    Plot,
    Rate,
    SaturationS,
    Seed,
    ServedConfig,
    ServerLogs,
    TensorParallel,
    check_served,
    failed,
    write_plot,
)


def soak(
    context: typer.Context,
    minutes: Annotated[float, typer.Option(min=0.5, help="How long the load lasts.")] = 60.0,
    load: LoadShare = 0.8,
    rate: Rate = 0.0,
    sample: Annotated[
        float, typer.Option(min=1.0, help="Seconds between two looks at the processes.")
    ] = 10.0,
    warmup: Annotated[
        float | None,
        typer.Option(help="Seconds left out of memory fits; a quarter of the time, at most 600, if unset."),
    ] = None,
    limit: Annotated[float, typer.Option(help="MB per hour above which a process leaks.")] = 8.0,
    cells: Cells = 1,
    front_ends: FrontEnds = 1,
    tensor_parallel: TensorParallel = 1,
    policy: Annotated[str, typer.Option(help="Speculation policy.")] = "flotilla",
    config: ServedConfig = None,
    distinct: NumDistinct = 84,
    max_tokens: DistinctMaxTokens = 96,
    saturation_s: SaturationS = 20.0,
    plot: Plot = None,
    logs: ServerLogs = Path("/tmp/flotilla-soak"),
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Load a system steadily for long: does memory grow, is anything left when idle, does latency stay?

    Ends with status 1 if something leaks, an answer is lost or wrong, or latency rises by more than 5 %.
    """
    from benchmarks import soak as measured
    from benchmarks import tables
    from benchmarks.live_system import SystemOptions

    check_served(context, config)
    try:
        options = measured.SoakOptions(
            system=SystemOptions(cells, front_ends, tensor_parallel, policy=policy, config=config),
            minutes=minutes,
            load=load,
            rate=rate,
            saturation_s=saturation_s,
            sample_s=sample,
            warmup_s=warmup,
            limit_mb_per_hour=limit,
            num_distinct=distinct,
            max_tokens=max_tokens,
            seed=seed,
            logs=logs,
        )
        record = measured.run(options)
    except (ValueError, RuntimeError, OSError) as error:
        raise failed("soak", error) from None
    tables.write_json(json_file, record)
    _print(record, measured.leaks(record))
    if plot is not None:
        from benchmarks.soak_plot import draw

        write_plot(draw, record, plot)
    if not measured.is_sound(record):
        raise typer.Exit(1)


def _print(record: dict[str, Any], leaks: list[str]) -> None:
    from benchmarks import tables
    from benchmarks.soak_verdict import LATENCY_WITHIN

    counts = {one["pid"]: one for one in record["counts"]}
    rows = []
    for one in record["memory"]:
        if not one["ours"]:
            continue
        slope, count = one["mb_per_hour"], counts[one["pid"]]
        rows.append(
            [
                f"{one['role'].replace('_', ' ')} {one['pid']}",
                f"{one['first_mb']:.0f}",
                f"{one['last_mb']:.0f}",
                "-"
                if slope is None
                else f"{slope['value']:+.1f} ({slope['low']:+.1f} to {slope['high']:+.1f})",
                one["verdict"],
                f"{count['fds_settled']:.0f} / {count['fds_end']:.0f} / {count['fds_most']:.0f}",
                f"{count['threads_settled']:.0f} / {count['threads_end']:.0f}",
            ]
        )
    heads = [
        "process",
        "MB at first",
        "MB at last",
        "MB/hour (95 %)",
        "memory",
        "files: settled/end/most",
        "threads",
    ]
    tables.console.print(tables.plain_table("Private memory of our processes", heads, rows))
    latency = record["latency"]
    rows = []
    for name in ("ttft_ms", "tpot_ms"):
        part = latency[name]
        change = "-" if part["change"] is None else f"{100.0 * part['change']:+.1f}%"
        figures = [
            tables.number(part[when][what], 2) for when in ("first", "last") for what in ("median", "p95")
        ]
        rows.append([name, *figures, change])
    title = f"Latency of the first and the last {latency['window_s'] / 60.0:.1f} minutes"
    heads = ["", "first median", "p95", "last median", "p95", "change of the median"]
    tables.console.print(tables.plain_table(title, heads, rows))
    answers = record["answers"]
    tables.console.print(
        f"{answers['requests']:,} requests at {record['requests_per_s']:.2f}/s: "
        f"{answers['turned_away']} turned away, {answers['lost']} lost, "
        f"{answers['differing'] + answers['duplicated'] + answers['missing']} differ "
        f"({record['num_unproven']} choices not at a near tie), {answers['refused']} refused"
    )
    idle = record["idle"]
    use = " and ".join(tables.percent(idle[when]["kv_use"]) for when in ("before", "after"))
    tables.console.print(
        f"Metric series {idle['before']['series']} before and {idle['after']['series']} after; KV slots in "
        f"use when idle {use}"
    )
    if latency["within"] is False:
        tables.console.print(f"[red]Latency rose by more than {LATENCY_WITHIN:.0%}.[/]")
    for line in leaks:
        tables.console.print(f"[red]{line}[/]")
    if not leaks:
        tables.console.print("Nothing was left when idle, and no process was shown to grow.")
