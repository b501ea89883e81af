"""`flotilla bench dashboards`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli_common import JsonFile, failed, to_write


def dashboards(
    seconds: Annotated[float, typer.Option(min=15, help="Seconds of load.")] = 60.0,
    streams: Annotated[int, typer.Option(min=1, help="Requests open at once.")] = 14,
    scrape: Annotated[
        Path | None, typer.Option(callback=to_write, help="Write the exposition after the load to it.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Ask a real Prometheus every query of dashboards, rules and alerts; exits 1 if one returns nothing."""
    from benchmarks import dashboards as proof
    from benchmarks import tables
    from deployments.dashboards.command import DashboardsFailed

    try:
        record = proof.run(proof.DashboardOptions(seconds=seconds, streams=streams, scrape=scrape))
    except (DashboardsFailed, RuntimeError) as error:
        raise failed("dashboards", error) from None
    tables.write_json(json_file, record)
    rows = [[one["where"], one["what"], one["reason"], one["expr"]] for one in record["dead"]]
    if rows:
        columns = ("where", "what", "reason", "query")
        tables.console.print(tables.plain_table("Queries that return nothing", columns, rows))
    asked = ", ".join(f"{count} {kind}" for kind, count in record["num_queries"].items())
    tables.console.print(f"Queries: {asked}; {len(rows)} returned nothing. Answers: {record['answers']}")
    if rows:
        raise typer.Exit(1)
