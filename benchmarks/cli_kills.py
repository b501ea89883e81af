"""`flotilla bench kills`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cli_common import (
    Cells,
    DistinctMaxTokens,
    FrontEnds,
    JsonFile,
    LoadShare,
    NumDistinct,
    Plot,
    Rate,
    SaturationS,
    Seed,
    ServedConfig,
    ServerLogs,
    TensorParallel,
    check_served,
    failed,
    write_plot,
)


def kills(
    context: typer.Context,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long processes are killed.")] = 30.0,
    every: Annotated[float, typer.Option(help="Seconds between two kills.")] = 20.0,
    roles: Annotated[
        str, typer.Option(help="What is killed, in turn: of drafter, verifier, scheduler, front_end.")
    ] = "drafter,verifier,scheduler,front_end",
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop processes (SIGSTOP) in place of ending them.")
    ] = False,
    load: LoadShare = 0.6,
    rate: Rate = 0.0,
    cells: Cells = 1,
    front_ends: FrontEnds = 2,
    tensor_parallel: TensorParallel = 1,
    policy: Annotated[
        str,
        typer.Option(help="Speculation policy; one that drafts in every step shows when a drafter is back."),
    ] = "adaserve",
    config: ServedConfig = None,
    quiet: Annotated[float, typer.Option(min=5.0, help="Seconds of load before the first kill.")] = 30.0,
    distinct: NumDistinct = 84,
    max_tokens: DistinctMaxTokens = 96,
    saturation_s: SaturationS = 20.0,
    give_up: Annotated[float, typer.Option(min=5.0, help="Seconds until an answer counts as lost.")] = 120.0,
    plot: Plot = None,
    logs: ServerLogs = Path("/tmp/flotilla-kills"),
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Kill processes of a served system under load; every answer is compared with the undisturbed one.

    Ends with status 1 if a request that was accepted is lost, has tokens twice, or differs. Those of which
    every attempt was refused, until the client gave up, were turned away and not lost.
    """
    from benchmarks import kills as measured
    from benchmarks import tables
    from benchmarks.live_system import SystemOptions

    check_served(context, config)
    try:
        options = measured.KillOptions(
            system=SystemOptions(cells, front_ends, tensor_parallel, policy=policy, config=config),
            minutes=minutes,
            every_s=every,
            roles=measured.parse_roles(roles),
            stop=stop,
            load=load,
            rate=rate,
            saturation_s=saturation_s,
            quiet_s=quiet,
            num_distinct=distinct,
            max_tokens=max_tokens,
            give_up_s=give_up,
            seed=seed,
            logs=logs,
        )
        record = measured.run(options)
    except (ValueError, RuntimeError, OSError) as error:
        raise failed("kills", error) from None
    tables.write_json(json_file, record)
    _print(record)
    if plot is not None:
        from benchmarks.kills_plot import draw

        write_plot(draw, record, plot)
    if not measured.is_lossless(record):
        raise typer.Exit(1)


def _print(record: dict[str, Any]) -> None:
    from benchmarks import tables

    columns = ["phase", "requests", "same", "turned away", "lost", "twice", "missing", "differing"]
    names = ["requests", "same", "turned_away", "lost", "duplicated", "missing", "differing"]
    columns, names = [*columns, "refusals", "breaks"], [*names, "refused", "broken"]
    rows = [
        [phase, *(f"{record[phase][name]:,}" for name in names)]
        for phase in ("undisturbed", "killed", "afterwards")
    ]
    tables.console.print(tables.plain_table("Answers, compared with those asked alone", columns, rows))
    tables.console.print(
        f"{len(record['differences'])} choices differ, {record['num_unproven']} of them not at a near tie; "
        f"{record['unexplained_breaks']} connections broke while no front end was away; "
        f"{record['requests_per_s']:.2f} requests/s"
    )
    times = ["replaced_s", "first_token_s", "pause_s", "throughput_s", "noticed_s"]
    rows = [
        [role, str(of["kills"]), *(_spread(of[name]) for name in times), str(of["resumed"])]
        for role, of in record["recovery"].items()
    ]
    heads = ["killed", "times", "replaced", "first token", "pause", "90% throughput", "noticed", "resumed"]
    title = "Seconds from the kill: median / 95th percentile (not seen)"
    tables.console.print(tables.plain_table(title, heads, rows))
    rows = []
    for domain, parts in record["attainment"]["by_time"].items():
        quiet = record["attainment_quiet"].get(domain, {}).get("after")
        rows.append([domain, *(_share(part) for part in (quiet, parts.get("during"), parts.get("after")))])
    heads = ["class", "before the kills", "within 10 s of one", "later"]
    tables.console.print(tables.plain_table("Attainment (requests)", heads, rows))
    for line in record["skipped"]:
        tables.console.print(f"[yellow]not killed: {line}[/]")


def _spread(times: dict[str, Any]) -> str:
    if times["median"] is None:
        return "-"
    missing = f" ({times['missing']})" if times["missing"] else ""
    return f"{times['median']:.2f} / {times['p95']:.2f}{missing}"


def _share(part: dict[str, Any] | None) -> str:
    return "-" if part is None else f"{100.0 * part['attained']:.1f}% ({part['requests']})"
