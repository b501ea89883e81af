"""`flotilla bench chaos`."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.cli_common import JsonFile


def chaos(
    schedules: Annotated[int, typer.Option(min=1, help="Schedules, each of a seed of its own.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Of the first schedule; the others follow.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="That run them side by side.")] = 2,
    json_file: JsonFile = None,
) -> None:
    """Search for faults of the scheduler core: random events, workers that fail, every token checked.

    No models run. What fails is shortened and printed as a Python script; the status is then 1.
    """
    from benchmarks import chaos as searching
    from benchmarks import tables

    record = searching.run(schedules, seed, processes)
    tables.write_json(json_file, record)
    for name, number in record["happened"].items():
        typer.echo(f"{name:>24}  {number}")
    typer.echo(f"{schedules} schedules in {record['seconds']:.1f} s, {record['failed']} failed")
    for failure in record["failures"]:
        seeds = ", ".join(map(str, failure["seeds"][:8]))
        typer.echo(f"\n{failure['kind']}: {failure['message']}\n(seeds {seeds})\n\n{failure['script']}")
    if record["failed"]:
        raise typer.Exit(1)
