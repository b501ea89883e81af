"""`flotilla bench overload`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cli_common import JsonFile, Plot, SaturationS, Seed, ServerLogs, failed, write_plot


def overload(
    times: Annotated[
        float, typer.Option(min=1.0, help="Load during the overload, in multiples of the saturated rate.")
    ] = 4.0,
    minutes: Annotated[float, typer.Option(min=0.05, help="How long it lasts.")] = 5.0,
    usual: Annotated[float, typer.Option(min=0.05, help="Share of that rate before and after.")] = 0.8,
    around: Annotated[float, typer.Option(min=2.0, help="Seconds of usual load before and after.")] = 60.0,
    saturation_s: SaturationS = 20.0,
    max_running: Annotated[int, typer.Option(min=1, help="Requests the cell decodes at once.")] = 8,
    max_waiting: Annotated[int, typer.Option(min=2, help="Requests that may wait.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=2, help="Bound on every answer's tokens.")] = 48,
    fair: Annotated[bool, typer.Option(help="Tell API keys apart.")] = True,
    plot: Plot = None,
    logs: ServerLogs = Path("/tmp/flotilla-overload"),
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Ask a served system for several times what it can do, from one of four API keys, in three tiers.

    Whoever is refused comes back when told. Reports attainment before, during and after, whether the times
    told were true, how soon all is well again, and what the other keys noticed.
    """
    from benchmarks import overload as measured
    from benchmarks import tables

    try:
        options = measured.OverloadOptions(
            times=times,
            minutes=minutes,
            usual=usual,
            before_s=around,
            after_s=around,
            saturation_s=saturation_s,
            max_running=max_running,
            max_waiting=max_waiting,
            max_tokens=max_tokens,
            fair=fair,
            seed=seed,
            logs=logs,
        )
        record = measured.run(options)
    except (ValueError, RuntimeError, OSError) as error:
        raise failed("overload", error) from None
    tables.write_json(json_file, record)
    _print(record)
    if plot is not None:
        from benchmarks.overload_plot import draw

        write_plot(draw, record, plot)


def _print(record: dict[str, Any]) -> None:
    from benchmarks import tables

    heads = ["", "phase", "sent", "refused", "on time, of those taken", "of all sent", "median TTFT ms"]
    for kind, title in (("tiers", "By tier"), ("keys", "By API key, tiers with objectives")):
        rows = [
            [
                name,
                phase,
                str(part["num_sent"]),
                str(part["num_refused"]),
                tables.percent(part["attained_of_taken"]),
                tables.percent(part["attained_of_sent"]),
                tables.number(part["ttft_ms_median"], 0),
            ]
            for name, phases in record[kind].items()
            for phase, part in phases.items()
        ]
        tables.console.print(tables.plain_table(title, heads, rows))
    rows = [
        [
            tier,
            str(part["num_refused"]),
            f"{part['num_taken_then']} of {part['num_came_back']}",
            tables.number(part["told_s_median"]),
            tables.number(part["told_s_most"]),
            tables.number(part["could_s_median"]),
        ]
        for tier, part in record["refusals"].items()
    ]
    heads = ["tier", "refusals", "taken when they came back", "told s", "most s", "next taken s"]
    tables.console.print(tables.plain_table("Refusals", heads, rows))
    tables.console.print(f"Saturated at {record['saturated_rate']:.2f} requests/s.")
    watched_s = record["phases"]["after_s"]
    everybody, others = (
        f"not in {watched_s:g} s" if seconds is None else f"from {seconds:.1f} s on"
        for seconds in (record["recovery_s"], record["recovery_of_others_s"])
    )
    tables.console.print(
        f"All on time after the overload: {everybody}, of other keys {others}; {record['num_errors']} failed."
    )
    for error in record["errors"]:
        tables.console.print(error, style="red", markup=False, highlight=False)
    late = record["client_late_s"]
    tables.console.print(
        f"Requests were sent {tables.number(late['p99'], 2)} s late (p99), "
        f"{tables.number(late['most'], 2)} s at most."
    )
