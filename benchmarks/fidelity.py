"""`flotilla bench fidelity`: measures once, keeps the record, and shows what the simulator made of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import tables
from benchmarks.acceptance_table import AcceptanceTable
from benchmarks.fidelity_cell import FidelityOptions, fidelity_config, measure
from benchmarks.fidelity_record import FidelityRecord, to_json
from deployments.output_files import check_output

RECORD = "record.json"
# Largest relative error below saturation that is wanted (issue 7).
WANTED = 0.10
# Names of a figure's simulated value and its error: with costs of the calibration runs, and of the test.
CALIBRATED, OWN = ("simulated", "error"), ("own costs", "error with own costs")
_SHOWN = {
    "latency_ms": ("latency ms", 1),
    "ttft_ms": ("TTFT ms", 1),
    "tpot_ms": ("TPOT ms", 2),
    "attainment": ("attainment", 3),
    "goodput_tokens_s": ("goodput tokens/s", 0),
}
_STEPS = {
    "drafted_share": ("with drafts", 2),
    "requests_per_step": ("requests", 2),
    "rows_per_request_step": ("rows each", 2),
    "tokens_per_request_step": ("tokens each", 2),
    "rate": ("rate estimated", 2),
    "planned_depth": ("depth planned", 2),
    "step_ms": ("iteration ms", 2),
    "draft_ms": ("drafting", 2),
    "forward_ms": ("forward", 2),
    "beside_ms": ("beside", 2),
}


def measured(options: FidelityOptions) -> FidelityRecord:
    """The record in the folder, or one measured now and left there.

    Raises:
        ValueError: for options that do not fit, before anything is started.
    """
    path = options.folder / RECORD
    if path.exists():
        tables.console.print(f"Comparing with the measurements in {path}; other options are not looked at.")
        record = msgspec.json.decode(path.read_bytes(), type=FidelityRecord)
        record.acceptance_file = str(options.folder / Path(record.acceptance_file).name)
        return record
    options.folder.mkdir(parents=True, exist_ok=True)
    with tables.console.status("...") as status:
        record = measure(options, status.update)
    path.write_bytes(to_json(record))
    tables.console.print(f"Wrote {path}.")
    return record


def acceptance_log(path: Path, prompts: int | None) -> AcceptanceTable:
    """The log in a file, recorded there with the demo family's model drafters if it does not exist.

    Raises:
        ValueError: if the file is no log, or cannot be made.
        OSError: if it cannot be read.
    """
    if path.exists():
        tables.console.print(f"Reading the choices recorded in {path}; --prompts is not looked at.")
        return AcceptanceTable.load(path)
    check_output(path)
    from benchmarks.acceptance_log import record_zoo

    options = FidelityOptions(
        policies=(), loads=(), seeds=(), duration_s=0.0, calibration_s=0.0, folder=path.parent
    )
    with tables.console.status("The target answers, and drafters read along..."):
        return record_zoo(path, fidelity_config(options), prompts)


def show(result: Mapping[str, Any]) -> None:
    """Served and simulated figures side by side, and how far they are apart."""
    for title, columns, said in (
        ("Requests", _SHOWN, CALIBRATED),
        ("Requests, costs of the test itself", _SHOWN, OWN),
        ("Iterations, costs of the test itself", _STEPS, OWN),
    ):
        rows = []
        for point in result["points"]:
            cells = [_cell(point["figures"][name], said, digits) for name, (_, digits) in columns.items()]
            rows.append([f"{point['policy']} at {point['load']:g}x", *cells])
        heads = ["", *(head for head, _ in columns.values())]
        tables.console.print(tables.plain_table(f"{title}: served / simulated (error)", heads, rows))
    for costs, said in (("calibrated just before", CALIBRATED), ("of the test itself", OWN)):
        worst, where = worst_error(result, said)
        verdict = "within" if worst <= WANTED else "more than"
        tables.console.print(
            f"Costs {costs}: largest error of latency, TTFT, TPOT, attainment and goodput "
            f"{'without bound' if math.isinf(worst) else f'{worst:.1%}'} ({where}), {verdict} the "
            f"{WANTED:.0%} wanted."
        )
    if result["num_unanswered"]:
        tables.console.print(
            f"[yellow]{result['num_unanswered']} requests of the tests were not answered, and are in no "
            "figure, served or simulated.[/yellow]"
        )
    for name, fitted in result["fitted"].items():
        tables.console.print(f"{name}: fitted to {fitted['num_steps']} calibration steps: {fitted}")


def worst_error(result: Mapping[str, Any], said: tuple[str, str]) -> tuple[float, str]:
    """The largest relative error of the requests' figures, and whose it is.

    Infinite where something was simulated and nothing served, as an attainment of 0.
    """
    simulated, error = said
    found = []
    for point in result["points"]:
        for name in _SHOWN:
            figure = point["figures"][name]
            size = math.inf if figure[simulated] else 0.0
            if figure[error] is not None:
                size = abs(figure[error])
            found.append((size, f"{name} of {point['policy']} at {point['load']:g}x"))
    return max(found)


def show_acceptance(result: Mapping[str, Any]) -> None:
    """The fit's checks on held-out prompts."""
    rows = []
    for drafter, classes in result["checks"].items():
        for domain, check in classes.items():
            survival = check["survival"]
            rows.append(
                [
                    f"{drafter} on {domain}",
                    f"{check['answers']}",
                    _pair(check["rate"]),
                    *(
                        f"{survival['measured'][depth - 1]:.2f} / {survival['model'][depth - 1]:.2f}"
                        for depth in (2, 4, 6)
                    ),
                    _pair(check["lag correlation"]),
                    _pair(check["calibration error"]),
                ]
            )
    heads = ["", "answers", "rate", "2 in a row", "4", "6", "lag correlation", "calibration error"]
    title = "Held-out prompts: measured / model"
    tables.console.print(tables.plain_table(title, heads, rows))


def show_speed(result: Mapping[str, Any]) -> None:
    """Speed by system, and where the time goes."""
    rows = []
    for system, part in result["systems"].items():
        rows.append(
            [
                system,
                f"{part['times real time']:.0f}",
                f"{part['iterations per simulated second']:.1f}",
                f"{part['microseconds per iteration']:.0f}",
                *(f"{part['microseconds'][name]:.0f}" for name in result["parts"]),
                f"{part['microseconds allowed']:.0f}",
            ]
        )
    heads = ["", "times real time", "iterations/s", "us per iteration", *result["parts"], "us for 1,000x"]
    tables.console.print(tables.plain_table("Simulator, processor time", heads, rows))
    together = result["together"]
    tables.console.print(
        f"{together['processes']} processes at once: {together['times real time']:.0f} times real time "
        f"({together['system']}, {together['runs']} seeds, wall time)."
    )


def _cell(figure: Mapping[str, Any], said: tuple[str, str], digits: int) -> str:
    simulated, error = (figure[name] for name in said)
    shown = "" if error is None else f" ({100.0 * error:+.1f}%)"
    return f"{figure['served']:,.{digits}f} / {simulated:,.{digits}f}{shown}"


def _pair(check: Mapping[str, float]) -> str:
    return f"{check['measured']:.3f} / {check['model']:.3f}"
