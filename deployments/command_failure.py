"""How a command of `flotilla` ends when what it was asked cannot be done."""

from __future__ import annotations

from typing import NoReturn

import typer


def fail(message: str) -> NoReturn:
    """Say why on standard error, and end the command with status 2."""
    typer.secho(f"flotilla: {message}", err=True, fg=typer.colors.RED)
    raise typer.Exit(2)
