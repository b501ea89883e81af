"""`flotilla rollout`: a running system goes over to another configuration or version."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from deployments.command_failure import fail
from deployments.joining import join


def rollout(
    config: Annotated[Path, typer.Argument(help="The configuration to go over to; may be the same.")],
    address: Annotated[
        str | None,
        typer.Option(help="Of the Ray cluster; RAY_ADDRESS, or the one on this machine, if left out."),
    ] = None,
) -> None:
    """Replace cells and front ends of a running system, one after the other, without a failed request.

    With the same configuration its processes are made anew, from what is installed now.
    """
    import yaml
    from pydantic import ValidationError

    from cluster.config import FlotillaConfig
    from cluster.config_errors import wrong_fields

    try:
        wanted = FlotillaConfig.load(config)
    except ValidationError as error:
        lines = wrong_fields(error, model=FlotillaConfig)
        fail("\n  ".join([f"{config}: the configuration is wrong", *lines]))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        fail(f"cannot read {config}: {error}")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    from deployments.rollout import RolloutError, begin

    address = address or os.environ.get("RAY_ADDRESS", "auto")
    try:
        join(address)
    except (ConnectionError, ValueError) as error:
        fail(
            f"there is no Ray cluster to connect to: {error}. One that `flotilla serve` started by itself "
            "cannot be joined; send that process SIGHUP, and it rolls out its configuration file"
        )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # how it connects is no news
    shown = ""
    try:
        for progress in begin(wanted):
            if progress.summary() != shown:
                shown = progress.summary()
                typer.echo(shown)
            if progress.has_failed:
                fail(progress.failure)
    except RolloutError as error:
        fail(str(error))
    finally:
        ray.shutdown()
    typer.echo("done")
