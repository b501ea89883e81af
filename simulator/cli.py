"""`flotilla simulate`: one cell on simulated hardware, with one system or several on identical requests."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks.acceptance_table import AcceptanceTable
from benchmarks.arrivals import rescale
from benchmarks.objectives import parse_slos
from benchmarks.tables import make_console
from benchmarks.workload import parse_mix
from deployments.command_failure import fail
from engine.own_classes import OwnClassError
from selector.registry import SELECTORS
from simulator import hardware, oracle, report, systems, workloads
from simulator.background import in_background
from simulator.metrics import ALL, BACKGROUND, RunResult
from simulator.recorded import RecordedAcceptance
from simulator.run import Options, simulate
from simulator.sweep import Job, run_jobs

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
# Of a shorter run the requests served while the queue fills and drains are most.
SECONDS = 600.0
# Of a run: all are in memory, and a simulator that takes weeks helps nobody.
MOST_REQUESTS = 10_000_000


@app.command()
def run(
    profile: Annotated[
        str, typer.Option(help="Models and hardware: a name, or a JSON file; `--list` shows the names.")
    ] = "llama-70b-a100",
    policy: Annotated[
        str,
        typer.Option(
            help="Systems on identical requests, parted by commas: flotilla, adaserve, vllm, sarathi, "
            "vllm-spec-4, ..., or POLICY/BATCHING as in specserve/sarathi; `oracle` drafts what is accepted."
        ),
    ] = "flotilla",
    rate: Annotated[
        float | None,
        typer.Option(
            min=1e-6, help="Requests per second; 4 if unset. A file is stretched to it, as a whole."
        ),
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="A full loop instead: all (--rate times --seconds) are there from the start, so many are "
            "served at once.",
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Classes in turns, no objectives, by median tokens of prompt and answer: code=110:55,..."
        ),
    ] = None,
    background: Annotated[
        int,
        typer.Option(
            min=0,
            help="So many more requests wait from the start that nobody is in a hurry for: of the same "
            "lengths, without objectives, at a lower priority. The run does not wait for them.",
        ),
    ] = 0,
    prefill_chunk: Annotated[int, typer.Option(min=8, help="Most prompt tokens of a verify call.")] = 512,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of arrivals.")] = SECONDS,
    workload: Annotated[
        Path | None,
        typer.Option(
            help="AdaServe workload (.json), Azure (.csv) or Mooncake (.jsonl) trace, also gzipped."
        ),
    ] = None,
    mix: Annotated[
        str | None, typer.Option(help="Shares of the built-in classes: code=60,chat=20,summary=20.")
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="Objectives by class, as in `flotilla bench`: code:1.2x,chat:tpot=50, *:ttft=2000."
        ),
    ] = None,
    burstiness: Annotated[
        float | None, typer.Option(min=0.01, help="Gamma shape of the gaps; 1, the default, is Poisson.")
    ] = None,
    peaks: Annotated[bool, typer.Option("--peaks", help="Classes peak one after the other.")] = False,
    max_depth: Annotated[int, typer.Option(min=0, max=16, help="Deepest draft.")] = 8,
    max_width: Annotated[int, typer.Option(min=1, max=4, help="Widest beam.")] = 4,
    acceptance: Annotated[
        Path | None,
        typer.Option(
            help="What drafters say is as recorded in this log (`flotilla bench acceptance LOG`), and not as "
            "the profile's model of acceptance has it."
        ),
    ] = None,
    selector: Annotated[
        str,
        typer.Option(
            help="Which drafter serves which request, where the profile has several: "
            f"{', '.join(SELECTORS)}, or the import path of your own."
        ),
    ] = "flotilla",
    async_scheduling: Annotated[
        bool,
        typer.Option(
            "--async-scheduling",
            help="Plain steps are sent ahead, as cells do and the papers' systems do not.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of requests, texts and drafts.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, where there are several systems.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    show: Annotated[bool, typer.Option("--list", help="List the profiles and end.")] = False,
) -> None:
    """Serve requests on a simulated cell: the real scheduler, simulated workers, no models."""
    console = Console(stderr=json)
    if show:
        for name in hardware.names():
            held = hardware.load(name)
            proposing = (*held.drafters.values(), *((held.eagle,) if held.eagle else ()))
            drafters = ", ".join(drafter.model for drafter in proposing)
            console.print(
                f"[bold]{name}[/bold]: {held.target} with {drafters} on {held.hardware}\n  {held.source}"
            )
        return
    try:
        chosen = hardware.load(profile)
        if acceptance is not None and chosen.eagle is not None:
            raise ValueError("--acceptance: a log of drafters says nothing of this profile's EAGLE layer")
        said = None if acceptance is None else RecordedAcceptance(AcceptanceTable.load(acceptance))
        bounds = systems.Bounds(
            prefill_chunk=prefill_chunk,
            max_depth=max_depth,
            max_width=max_width,
            selector=selector,
            async_scheduling=async_scheduling,
        )
        if at_once is not None:
            bounds = replace(bounds, max_running=at_once)
        served_by = [oracle.parse(name.strip(), bounds) for name in policy.split(",") if name.strip()]
        if not served_by:
            raise ValueError("--policy names no system")
        slos = parse_slos(slo or [])
        if peaks and at_once is not None:
            raise ValueError("--peaks or --at-once: requests that are all there at the start have no peaks")
        if background and at_once is not None:
            raise ValueError("--background or --at-once: in a full loop nobody is in a hurry")
        if burstiness is not None and (workload is not None or peaks or at_once is not None):
            raise ValueError(
                "--burstiness is of arrivals that are drawn: not of a file's, peaks or --at-once"
            )
        shapes = _shapes(workload, rate, seconds, mix, lengths, seed)
        # Of the built-in mix all classes count: few requests need not be of each.
        built_in = workloads.MIX if workload is None and lengths is None else ()
        workloads.check_classes(slos, [*built_in, *(shape.kind for shape in shapes)])
        kinds = {shape.kind for shape in shapes}
        _check_names(kinds, has_background=background > 0)
        if said is not None:
            said.check(chosen.drafters, kinds, max_width)
        else:
            chosen.check(kinds)
        if at_once is not None:
            shapes = [replace(shape, arrival_s=0.0) for shape in shapes]
        own_times = at_once is not None or (workload is not None and not peaks)
        requests = workloads.arrive(
            shapes,
            chosen.baseline_s(),
            # A file's times are at the rate asked for already.
            rate=None if own_times else rate if workload is not None else rate or 4.0,
            burstiness=burstiness or 1.0,
            peaks=peaks,
            own_times=own_times,
            slos=slos,
            seed=seed,
        )
        beside = in_background([shapes[i % len(shapes)] for i in range(background)], seed)
    except (ValueError, OSError) as error:
        fail(str(error))
    options = Options(seed=seed, max_width=max_width, acceptance=said)
    started = perf_counter()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        try:
            if jobs > 1:
                task = bar.add_task("systems", total=len(served_by))
                results = run_jobs(
                    [Job(one.name, chosen, one, requests, options, beside) for one in served_by],
                    jobs,
                    lambda _: bar.advance(task),
                )
            else:
                results = []
                for one in served_by:
                    task = bar.add_task(one.name, total=len(requests))
                    on_progress = partial(_advance, bar, task)
                    results.append(simulate(chosen, one, requests, options, on_progress, beside))
        except OwnClassError as error:
            fail(str(error))
    _show(results, chosen, requests, perf_counter() - started, is_json=json)


def _check_names(kinds: set[str], *, has_background: bool) -> None:
    """See that no class is called as a sum of several is, whose row it would take."""
    taken = {*([ALL] if len(kinds) > 1 else []), *([BACKGROUND] if has_background else [])}
    for name in sorted(kinds & taken):
        raise ValueError(f"the results have a row `{name}` of their own: give that class another name")


def _advance(bar: Progress, task: TaskID, now: float, num_ended: int) -> None:
    bar.update(task, completed=num_ended)


def _shapes(
    path: Path | None, rate: float | None, seconds: float, mix: str | None, lengths: str | None, seed: int
) -> list[workloads.Shape]:
    number = (rate or 4.0) * seconds
    if not number <= MOST_REQUESTS:
        raise ValueError(
            f"--rate times --seconds are {number:g} requests, and the most are {MOST_REQUESTS:,}"
        )
    count = max(1, round(number))
    if sum(given is not None for given in (path, mix, lengths)) > 1:
        raise ValueError("one of --workload, --mix and --lengths: each says what the requests are")
    if lengths is not None:
        return workloads.of_lengths(count, seed, workloads.parse_lengths(lengths))
    if path is None:
        return workloads.synthetic(count, seed, None if mix is None else parse_mix(mix))
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    if suffixes and suffixes[-1] == ".json":
        shapes = workloads.adaserve_file(path)
    else:
        shapes = workloads.trace_file(path)
    if rate is not None:
        # Before it is cut: seconds are those of the run, and not of a file that is read faster or slower.
        times = rescale([shape.arrival_s or 0.0 for shape in shapes], rate)
        shapes = [replace(shape, arrival_s=at) for shape, at in zip(shapes, times, strict=True)]
    shapes = workloads.cut(shapes, 0.0, seconds)
    if not shapes:
        raise ValueError(f"{path}: nothing arrives in the first {seconds:g} s")
    return shapes


def _show(
    results: list[RunResult],
    profile: hardware.HardwareProfile,
    requests: list[workloads.SimRequest],
    wall_s: float,
    *,
    is_json: bool,
) -> None:
    simulated_s = sum(result.simulated_s for result in results)
    if is_json:
        body = {
            "profile": profile.name,
            "baseline_ms": 1e3 * profile.baseline_s(),
            "num_requests": len(requests),
            "wall_s": wall_s,
            "runs": [msgspec.to_builtins(result) for result in results],
        }
        typer.echo(msgspec.json.format(msgspec.json.encode(body), indent=2).decode())
        return
    console = make_console()
    title = f"{profile.target} on {profile.hardware}, baseline {1e3 * profile.baseline_s():.1f} ms per token"
    console.print(report.by_class(results, title))
    console.print(report.of_steps(results))
    console.print(
        f"{simulated_s:.0f} simulated seconds in {wall_s:.1f} s: {simulated_s / wall_s:.0f} times real time"
    )
