"""`flotilla bench fidelity`, `acceptance`, `simulator`: the simulator against the system, and its speed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.cli_common import JsonFile, MaxTokens, failed, to_draw, to_write

# The simulator stands above the benchmarks; it is known here by name only.
_COMPARE, _FIT, _SPEED = "simulator.fidelity", "simulator.acceptance_fit", "simulator.speed"


def fidelity(
    folder: Annotated[
        Path,
        typer.Argument(file_okay=False, help="Where measurements go; a finished record there is used again."),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="As for `bench compare`; `autoregressive` and `flotilla` if unset. May repeat."),
    ] = None,
    load: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01, help="Share of the saturation throughput; 0.2, 0.4, 0.6, 0.8, 0.9 if unset. May repeat."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Test runs of every policy and load.")] = 3,
    duration: Annotated[float, typer.Option(min=1, help="Seconds of arrivals in a test.")] = 30.0,
    calibration: Annotated[
        float, typer.Option(min=1, help="Seconds of arrivals in the calibration run before each test.")
    ] = 20.0,
    drafter: Annotated[
        list[str] | None, typer.Option(help="Model drafters to use, by name; all if unset. May repeat.")
    ] = None,
    max_tokens: MaxTokens = None,
    config: Annotated[
        Path | None, typer.Option(exists=True, help="Cell configuration; the demo family if unset.")
    ] = None,
    simulations: Annotated[
        int, typer.Option(min=1, help="Of every test, with other noise; means are compared.")
    ] = 4,
    plot: Annotated[
        Path | None, typer.Option(callback=to_draw, help="Plot, like SmartSpec's figure 13.")
    ] = None,
    write_profile: Annotated[
        Path | None,
        typer.Option(
            callback=to_write, help="Write the cell as it served, for `flotilla simulate --profile`."
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Serve requests on the real cell, simulate the same ones, and compare latency, attainment and goodput.

    The real cell runs under Ray in its own processes, without HTTP. Costs and acceptance are measured just
    before, on other prompts than those compared.
    """
    import os

    # Before torch is imported: idle threads must not spin beside what is measured.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from benchmarks import fidelity as study
    from benchmarks import tables
    from benchmarks.fidelity_cell import FidelityOptions

    try:
        record = study.measured(
            FidelityOptions(
                policies=tuple(policy or ("autoregressive", "flotilla")),
                loads=tuple(load or (0.2, 0.4, 0.6, 0.8, 0.9)),
                seeds=tuple(range(seeds)),
                duration_s=duration,
                calibration_s=calibration,
                folder=folder,
                max_tokens=max_tokens,
                drafters=tuple(drafter or ()),
                config=config,
            )
        )
        with tables.console.status("Simulating..."):
            compared: dict[str, Any] = importlib.import_module(_COMPARE).compare(
                record, simulations=simulations, processes=os.cpu_count() or 1
            )
    except (ValueError, RuntimeError, OSError) as error:
        raise failed("fidelity", error) from None
    result = {"environment": record.environment, "saturation": record.saturation, **compared}
    study.show(result)
    tables.write_json(json_file, result)
    if write_profile is not None:
        profile = importlib.import_module(_COMPARE).written_profile(record, write_profile.stem)
        write_profile.write_bytes(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
        tables.console.print(f"Wrote {write_profile}.")
    if plot is not None:
        from benchmarks.fidelity_plot import draw

        draw(result, plot)
        tables.console.print(f"Wrote {plot}.")


def acceptance(
    log: Annotated[
        Path,
        typer.Argument(dir_okay=False, help="File (.npz) of drafters' choices; recorded now if not there."),
    ],
    prompts: Annotated[
        int | None, typer.Option(min=4, help="Held-out prompts of each class; all if unset.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Fit the simulator's acceptance model to half of the demo family's prompts, check it on the others."""
    from benchmarks import environment, tables
    from benchmarks import fidelity as study

    try:
        table = study.acceptance_log(log, prompts)
        result: dict[str, Any] = importlib.import_module(_FIT).fit_and_check(table)
    except (ValueError, RuntimeError, OSError) as error:
        raise failed("acceptance", error) from None
    study.show_acceptance(result)
    tables.write_json(json_file, {"environment": environment.describe(), **result})


def simulator(
    system: Annotated[
        list[str] | None,
        typer.Option(help="As for `flotilla simulate`; four of them if unset. May repeat."),
    ] = None,
    profile: Annotated[str, typer.Option(help="Hardware profile.")] = "llama-70b-a100",
    rate: Annotated[float, typer.Option(min=0.01, help="Requests per second.")] = 4.0,
    seconds: Annotated[float, typer.Option(min=1, help="Of arrivals.")] = 120.0,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions in turns; the fastest counts.")] = 3,
    processes: Annotated[
        int, typer.Option(min=1, help="Also run so many seeds at once, each in a process.")
    ] = 2,
    json_file: JsonFile = None,
) -> None:
    """Measure how much faster than real time the simulator is, and which part of it takes the time."""
    from benchmarks import environment, tables
    from benchmarks import fidelity as study

    try:
        result: dict[str, Any] = importlib.import_module(_SPEED).measure(
            tuple(system or ("vllm", "vllm-spec-4", "adaserve", "flotilla")),
            profile=profile,
            rate=rate,
            seconds=seconds,
            rounds=rounds,
            processes=processes,
        )
    except ValueError as error:
        raise failed("simulator", error) from None
    study.show_speed(result)
    tables.write_json(json_file, {"environment": environment.describe(), **result})
