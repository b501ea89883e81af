"""`flotilla bench grpc-cancel`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli_common import JsonFile, Seed, failed


def grpc_cancel(
    config: Annotated[
        Path | None, typer.Option(exists=True, help="Cell configuration; the demo family if unset.")
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="`direct` (front ends listen), `proxy` (Ray Serve's, watched) or `bare-proxy` (as Ray has "
            "it); may repeat. The first two if unset."
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Requests given up in each mode.")] = 200,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Give up requests over gRPC at random moments, and count those that the cell goes on with."""
    from typing import get_args

    from benchmarks import grpc_cancel as cancelling
    from benchmarks import tables
    from cluster.config import FlotillaConfig
    from deployments.demo import demo_config

    known = get_args(cancelling.Mode)
    for name in mode or ():
        if name not in known:
            raise typer.BadParameter(f"`{name}` is none of {', '.join(known)}", param_hint="--mode")
    modes: list[cancelling.Mode] = [name for name in known if name in (mode or ("direct", "proxy"))]
    try:
        settings = demo_config() if config is None else FlotillaConfig.load(config)
        record = cancelling.run(settings, modes, trials, seed)
    except (ValueError, RuntimeError, OSError) as error:
        raise failed("grpc-cancel", error) from None
    tables.write_json(json_file, record)
    watched = [record["modes"][name] for name in modes if name != "bare-proxy"]
    if any(row["lost"] for result in watched for row in result["ways"]):
        raise typer.Exit(1)
