"""`flotilla bench scheduler`."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.cli_common import JsonFile, Seed, failed

POLICIES = ["flotilla", "autoregressive"]
REQUESTS = [1, 8, 32, 64, 256]


def scheduler(
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policies: flotilla and autoregressive (without drafts) if unset. May repeat."),
    ] = None,
    requests: Annotated[
        list[int] | None, typer.Option(min=1, help="Running requests: 1, 8, 32, 64 and 256 if unset.")
    ] = None,
    batching: Annotated[str, typer.Option(help="Batching rule.")] = "flotilla",
    steps: Annotated[int, typer.Option(min=10, help="Steps of a run.")] = 300,
    repeats: Annotated[int, typer.Option(min=1, help="Runs, of which the quickest counts.")] = 5,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure a scheduler step, in processor time, with workers that answer from a script; no models run."""
    from benchmarks import scheduler_cost, tables

    try:
        record = scheduler_cost.run(policy or POLICIES, requests or REQUESTS, batching, steps, repeats, seed)
    except ValueError as error:
        raise failed("scheduler", error) from None
    tables.write_json(json_file, record)
