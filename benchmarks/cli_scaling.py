"""`flotilla bench scaling`."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.cli_common import JsonFile, Plot, Seed, failed, write_plot


def scaling(
    max_cells: Annotated[int, typer.Option(min=2, help="Most cells.")] = 3,
    streams: Annotated[str, typer.Option(help="Open streams of each phase.")] = "1,24,1",
    phase_s: Annotated[str, typer.Option(help="Seconds of each phase.")] = "10,90,30",
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens of every answer.")] = 96,
    max_running: Annotated[int, typer.Option(min=1, help="Requests a cell decodes at once.")] = 4,
    tpot_ms: Annotated[float, typer.Option(help="Objective for the time per token.")] = 40.0,
    ttft_ms: Annotated[float, typer.Option(help="Objective for the first token.")] = 1000.0,
    plot: Plot = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Raise the number of cells by load and lower it again; exits 1 if an answer is lost or differs."""
    from benchmarks import scaling as measured
    from benchmarks import tables

    try:
        options = measured.ScalingOptions(
            max_cells=max_cells,
            streams=tuple(int(part) for part in streams.split(",")),
            phase_s=tuple(float(part) for part in phase_s.split(",")),
            max_tokens=max_tokens,
            max_running=max_running,
            tpot_ms=tpot_ms,
            ttft_ms=ttft_ms,
            seed=seed,
        )
        record = measured.run(options)
    except (ValueError, RuntimeError) as error:
        raise failed("scaling", error) from None
    tables.write_json(json_file, record)
    tables.console.print(
        f"{record['num_requests']} requests, {record['num_failed']} failed, {record['num_differing']} differ "
        f"from those of one cell; at most {record['most_ready']} cells served, "
        f"{record['last_cells']} at the end"
    )
    if plot is not None:
        from benchmarks.scaling_plot import draw

        write_plot(draw, record, plot)
    if record["num_failed"] or record["num_differing"]:
        raise typer.Exit(1)
