"""`flotilla bench fidelity`: measures once, keeps the record, and shows what the simulator made of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import tables
from benchmarks.acceptance_table import AcceptanceTable
from benchmarks.fidelity_cell import FidelityOptions, fidelity_config, measure
from benchmarks.fidelity_record import FidelityRecord, to_json

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
    """The log in a file, recorded there with the demo family's model drafters if it does not exist."""
    if path.exists():
        return AcceptanceTable.load(path)
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
            f"Costs {costs}: largest error of latency, TTFT, TPOT, attainment and goodput {worst:.1%} "
            f"({where}), {verdict} the {WANTED:.0%} wanted."
        )
    for name, fitted in result["fitted"].items():
        tables.console.print(f"{name}: fitted to {fitted['num_steps']} calibration steps: {fitted}")


def worst_error(result: Mapping[str, Any], said: tuple[str, str]) -> tuple[float, str]:
    """The largest relative error of the requests' figures, and whose it is."""
    _, error = said
    found = [
        (abs(point["figures"][name][error]), f"{name} of {point['policy']} at {point['load']:g}x")
        for point in result["points"]
        for name in _SHOWN
        if point["figures"][name][error] is not None
    ]
    return max(found, default=(0.0, "nothing"))


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
