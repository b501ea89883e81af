"""`flotilla plan`: from objectives and a request rate to cells, GPUs and a values file for the chart."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks import tables
from benchmarks.cli_common import JsonFile, to_write
from benchmarks.objectives import parse_slos
from benchmarks.workload import parse_mix
from deployments.command_failure import fail
from simulator import chart_values, hardware, report, systems, workloads
from simulator.metrics import ALL
from simulator.sizing import MOST_CELLS, Load, Sizing, size

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_HEAD = """\
# Made by `flotilla plan` from a simulated cell; {profile}.
# {rate:g} requests/s; one cell keeps {target:.0%} of every class within its objectives up to {cell_rate:.2f}
# requests/s in the simulator. Fill in image, model paths and the volume that holds them.
"""


@app.command()
def plan(
    rate: Annotated[float, typer.Option(min=1e-6, help="Requests per second of all.")],
    profile: Annotated[
        str, typer.Option(help="Models and hardware of a cell; `flotilla simulate --list` shows the names.")
    ] = "llama-70b-h100",
    mix: Annotated[
        str | None, typer.Option(help="Shares of the built-in classes: code=60,chat=20,summary=20.")
    ] = None,
    slo: Annotated[
        list[str] | None, typer.Option(help="Objectives by class: code:1.2x,chat:tpot=50, *:ttft=2000.")
    ] = None,
    target: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of every class within its objectives.")
    ] = 0.95,
    headroom: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Share of each cell's capacity that is kept free.")
    ] = 0.2,
    spare: Annotated[
        int, typer.Option(min=0, max=MOST_CELLS, help="Cells beyond the load's, to lose without harm.")
    ] = 0,
    burstiness: Annotated[float, typer.Option(min=0.01, help="Gamma shape of the gaps; 1 is Poisson.")] = 1.0,
    peaks: Annotated[bool, typer.Option("--peaks", help="Classes peak one after the other.")] = False,
    policy: Annotated[str, typer.Option(help="System, as of `flotilla simulate`.")] = "flotilla",
    seconds: Annotated[float, typer.Option(min=1.0, help="Of arrivals in each run.")] = 120.0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs at each rate.")] = 2,
    values_file: Annotated[
        Path | None,
        typer.Option("--values", help="Write values for the Helm chart to this file.", callback=to_write),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Size an installation in the simulator: find what one cell carries, and count cells and GPUs."""
    console = Console(stderr=True)
    try:
        if peaks and burstiness != 1.0:
            raise ValueError("--burstiness is of arrivals that are drawn: not of --peaks")
        chosen = hardware.load(profile)
        load = Load(
            mix=None if mix is None else parse_mix(mix),
            slos=parse_slos(slo or []),
            burstiness=burstiness,
            peaks=peaks,
        )
        workloads.check_classes(load.slos, workloads.MIX)
        # A class that does not exist, or hardware without GPUs, is told before anything is simulated.
        chart_values.tiers(chosen, load)
        chart_values.gpus(chosen)
        system = systems.parse(policy)
        with console.status("Simulating one cell ...") as status:
            sizing = size(
                chosen,
                system,
                load,
                rate,
                target=target,
                headroom=headroom,
                num_spare=spare,
                seconds=seconds,
                seeds=range(seeds),
                progress=lambda at, attained: status.update(
                    f"Simulating one cell: {at:.2f} requests/s attain {attained:.1%} ..."
                ),
            )
    except KeyError as error:
        fail(f"no class {error} in the built-in mix")
    except (ValueError, OSError) as error:
        fail(str(error))
    record = _record(chosen, load, sizing, rate, target)
    _show(chosen, sizing, record)
    if json_file is not None:
        json_file.write_text(msgspec.json.format(msgspec.json.encode(record), indent=1).decode() + "\n")
    if not sizing.num_cells:
        fail(
            f"one cell of {chosen.name} does not keep {target:.0%} of every class within its objectives even "
            "when requests come one at a time; loosen them, or choose other hardware or models"
        )
    if values_file is not None:
        head = _HEAD.format(profile=chosen.source, rate=rate, target=target, cell_rate=sizing.cell_rate)
        try:
            found = chart_values.values(chosen, load, system, sizing.num_cells, target)
        except ValueError as error:
            fail(str(error))
        values_file.write_text(head + yaml.safe_dump(found, sort_keys=False))
        console.print(f"Wrote {values_file}.")


def _record(
    profile: hardware.HardwareProfile, load: Load, sizing: Sizing, rate: float, target: float
) -> dict[str, Any]:
    of_target, of_drafters, kind = chart_values.gpus(profile)
    return {
        "profile": profile.name,
        "source": profile.source,
        "rate": rate,
        "target": target,
        "tiers": chart_values.tiers(profile, load),
        "cell_rate": sizing.cell_rate,
        "num_cells": sizing.num_cells,
        "num_spare": sizing.num_spare,
        "gpus_per_cell": of_target + of_drafters,
        "num_gpus": sizing.num_cells * (of_target + of_drafters),
        "gpu": kind,
        "tried": [{"rate": at, "least_attainment": attained} for at, attained in sizing.tried],
        "at_capacity": msgspec.to_builtins(sizing.at_capacity),
    }


def _show(profile: hardware.HardwareProfile, sizing: Sizing, record: dict[str, Any]) -> None:
    console = tables.make_console()
    at = f"{sizing.cell_rate:.2f} requests/s" if sizing.cell_rate else "the lowest rate tried"
    console.print(report.by_class([sizing.at_capacity], f"One cell of {profile.name} at {at}"))
    if not sizing.num_cells:
        return
    table = Table(title=f"For {record['rate']:g} requests/s", title_justify="left", show_header=False)
    spare = f" ({sizing.num_spare} spare)" if sizing.num_spare else ""
    table.add_row("cells", f"{sizing.num_cells}{spare}")
    table.add_row("GPUs", f"{record['num_gpus']} {record['gpu']} ({record['gpus_per_cell']} per cell)")
    busy = record["rate"] / (sizing.num_cells * sizing.cell_rate)
    table.add_row("load of a cell", f"{busy:.0%} of what it carries")
    running = sizing.at_capacity.classes[ALL]
    table.add_row("tokens/s of a cell at that load", f"{busy * running.throughput_tokens_s:,.0f}")
    console.print(table)
    console.print(f"Forward times: {profile.source}; {profile.error}", style="dim", highlight=False)
