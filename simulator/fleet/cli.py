"""`flotilla simulate fleet`: many cells behind the router and the scaling rules that serve."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter
from typing import Annotated

import msgspec
import typer
from pydantic import ValidationError
from rich.console import Console

from benchmarks.cli_common import JsonFile, to_draw, to_write
from cluster.config_errors import wrong_fields
from deployments.command_failure import fail
from engine.own_classes import OwnClassError
from simulator.fleet import report, scenario
from simulator.fleet.run import FleetResult, check, run_detailed, run_large
from simulator.fleet.scenario import Scenario
from simulator.fleet.surface import Surface, measure
from simulator.process_pool import process_pool

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def fleet(
    name: Annotated[
        str, typer.Argument(help="Scenario: a name, or a YAML file; `--list` shows the names.")
    ] = "thousand-cells",
    scaling: Annotated[
        str,
        typer.Option(
            help="Who says how many cells there are, parted by commas: flotilla, ongoing, fixed, fixed=CELLS."
        ),
    ] = "flotilla",
    router: Annotated[
        str, typer.Option(help="Who chooses cells, by commas: flotilla, two-choices, round-robin.")
    ] = "flotilla",
    detailed: Annotated[
        bool, typer.Option("--detailed", help="The scheduler that serves in every cell; some tens of cells.")
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(min=1.0, help="Of arrivals; the scenario's if unset.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The scenario's if unset.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="The result does not depend on it.")] = 2,
    json_file: JsonFile = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write a report to this file.", callback=to_write)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the first run into this PNG.", callback=to_draw)
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the scenarios and end.")] = False,
) -> None:
    """Serve a scenario with many cells: routing and scaling are what serves, cells are simulated.

    With `--detailed` every cell has the scheduler that serves. Otherwise cells follow a response surface,
    which is measured first on single cells with that scheduler.
    """
    console = Console(stderr=True)
    try:
        if show:
            for known in scenario.names():
                held = scenario.load(known)
                console.print(
                    f"[bold]{known}[/bold]: {held.profile}, "
                    f"{held.cells.min} to {held.cells.max} cells, "
                    f"{held.arrivals.rate:g} requests/s, {held.arrivals.seconds:g} s"
                )
            return
        runs = _runs(scenario.load(name), scaling, router, seconds, seed)
        check(runs[0])
    except (ValueError, OSError) as error:
        fail(str(error))
    try:
        results = _serve(runs, processes, console, detailed=detailed)
    except OwnClassError as error:
        fail(str(error))
    Console().print(report.table(results))
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    if markdown is not None:
        seen = None if plot is None else os.path.relpath(plot, markdown.parent)
        markdown.write_text(report.markdown(runs[0], results, seen))
    if plot is not None:
        report.draw(results[0], plot)


def _serve(runs: list[Scenario], processes: int, console: Console, *, detailed: bool) -> list[FleetResult]:
    """What came of every run, in either form."""
    if detailed:
        with console.status("cells with the scheduler that serves"):
            return [run_detailed(one, processes) for one in runs]
    began = perf_counter()
    with console.status("measuring a cell"):
        surface = measure(runs[0], processes)
    console.print(f"measured a cell in {perf_counter() - began:.0f} s")
    with console.status("fleet"):
        return run_all(runs, surface, processes)


def run_all(runs: list[Scenario], surface: Surface, processes: int) -> list[FleetResult]:
    """Large runs, as many at once as there are processes."""
    if processes == 1 or len(runs) == 1:
        return [run_large(one, surface) for one in runs]
    with process_pool(min(processes, len(runs))) as pool:
        return list(pool.map(run_large, runs, [surface] * len(runs)))


def _runs(
    base: Scenario, scalings: str, routers: str, seconds: float | None, seed: int | None
) -> list[Scenario]:
    """The scenario with every rule for scaling and, of the first one, every router.

    Raises:
        ValueError: for a rule or router that is none.
    """
    raw = base.model_dump()
    if seconds is not None:
        raw["arrivals"]["seconds"] = seconds
    if seed is not None:
        raw["seed"] = seed
    runs = []
    for index, router in enumerate(routers.split(",")):
        for rule in scalings.split(",")[: None if index == 0 else 1]:
            kind, _, number = rule.strip().partition("=")
            changes: dict[str, object] = {"router": router.strip(), "scaling": kind}
            if number:
                changes["initial"] = number
            try:
                runs.append(Scenario.model_validate(raw | changes))
            except ValidationError as error:
                raise ValueError("; ".join(wrong_fields(error, whole="the run", model=Scenario))) from None
    return runs
