"""`flotilla reproduce`: the papers' figures in the simulator, and what came of their claims."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from deployments.command_failure import fail
from engine.caches import cache_directory
from simulator.reproduction import adaserve, demo, others, report
from simulator.reproduction.cache import Store
from simulator.reproduction.runner import Point, Scope, reproduce
from simulator.reproduction.spec import Figure, Value

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
FIGURES: dict[str, Figure] = {
    figure.name: figure for figure in (*adaserve.FIGURES, *others.FIGURES, *demo.FIGURES)
}
_CACHE = (cache_directory() or Path(".flotilla")) / "reproduce"


@app.command()
def run(
    figures: Annotated[
        list[str] | None, typer.Argument(help="Figures, or the beginning of their names (`spin`), or `all`.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short arrivals.")] = False,
    seeds: Annotated[str, typer.Option(help="As in 1,2,3; two if unset.")] = "",
    values: Annotated[str, typer.Option(help="Only these values of the axis, parted by commas.")] = "",
    data: Annotated[
        Path | None,
        typer.Option(help="Recorded data, with workloads/adaserve in it; else built-in statistics."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report and plots; else only tables.")
    ] = None,
    cache: Annotated[Path, typer.Option(help="Folder of results; what is in it is not run again.")] = _CACHE,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    stored: Annotated[bool, typer.Option("--stored", help="Run nothing; report what there is.")] = False,
    show: Annotated[bool, typer.Option("--list", help="List the figures and end.")] = False,
) -> None:
    """Run the papers' figures in the simulator, check their claims; it goes on where it was interrupted."""
    console = Console()
    if show or not figures:
        for figure in FIGURES.values():
            console.print(f"[bold]{figure.name}[/bold]: {figure.title}")
        return
    try:
        chosen = choose(figures)
        wanted = tuple(_value(text.strip()) for text in values.split(",") if text)
        for value in wanted:
            if not any(value in figure.points for figure in chosen):
                axes = "; ".join(f"{figure.name}: {', '.join(map(str, figure.points))}" for figure in chosen)
                raise ValueError(f"--values: {value} is on no axis of these figures ({axes})")
        scope = Scope(_seeds(seeds), quick, wanted, data, stored)
    except ValueError as error:
        fail(str(error))
    if data is not None and not (data / "workloads" / "adaserve").is_dir():
        fail(f"{data}: no folder workloads/adaserve in it")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("runs", total=None)

        def begin(total: int, held: int) -> None:
            bar.update(task, total=total, completed=held)

        def ended(point: Point) -> None:
            bar.update(task, advance=1, description=f"{point.figure} {point.label}")

        try:
            results = reproduce(chosen, scope, Store(cache, data), jobs, begin, ended)
        except KeyboardInterrupt:
            typer.secho(f"Interrupted; the same command goes on from {cache}.", err=True)
            raise typer.Exit(130) from None
        except OSError as error:
            fail(str(error))
    if out is None:
        for held in results.values():
            console.rule(held.figure.title)
            if not held.runs:
                console.print(f"Not run: flotilla reproduce {held.figure.name}", highlight=False)
                continue
            console.print(Markdown(report.claims_table(held)))
            for metric in held.figure.metrics:
                console.print(Markdown(report.numbers_table(held, metric)))
        return
    options = [("--seeds", seeds), ("--values", values), ("--data", "FOLDER" if data else "")]
    given = [f"{name} {value}" for name, value in options if value]
    command = " ".join(["flotilla reproduce", *figures, *(["--quick"] if quick else []), *given])
    path = report.write(results, scope, command, out)
    console.print(f"Wrote {path}")


def choose(names: list[str]) -> list[Figure]:
    """Figures by name or its beginning.

    Raises:
        ValueError: for a name that fits none, listing them.
    """
    if "all" in names:
        return list(FIGURES.values())
    for name in names:
        if not any(one.startswith(name) for one in FIGURES):
            raise ValueError(f"no figure {name!r}; there are: {', '.join(FIGURES)}")
    return [figure for one, figure in FIGURES.items() if any(one.startswith(name) for name in names)]


def _seeds(text: str) -> tuple[int, ...]:
    if not text:
        return (1, 2)
    seeds = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in seeds) or len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds {text}: different whole numbers parted by commas, as in 1,2,3")
    return tuple(map(int, seeds))


def _value(text: str) -> Value:
    try:
        return float(text)
    except ValueError:
        return text
