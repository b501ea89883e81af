"""What the benchmark commands' options have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")]
Seed = Annotated[int, typer.Option(help="Seed of the workload.")]


def failed(command: str, error: Exception) -> typer.Exit:
    """Say what went wrong, and give the exception that ends the command with status 2."""
    typer.secho(f"flotilla bench {command}: {error}", fg="red", err=True)
    return typer.Exit(2)
