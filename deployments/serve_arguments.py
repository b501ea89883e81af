"""`flotilla serve` for who types what other servers take: the model on the command line."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from deployments.command_failure import fail

_MODEL = "--model"


class ServeCommand(TyperCommand):
    """Says where the model belongs, where "no such option" would be all."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click."""
        named = _named_model(args)
        if named is not None:
            _refuse(named)
        return super().parse_args(ctx, args)


def _named_model(args: list[str]) -> str | None:
    """What is named as the model, empty for `--model` without a value; None if nothing is.

    Every option of `flotilla serve` but `--help` has a value.
    """
    for before, argument in zip(["", *args], args, strict=False):
        if argument == _MODEL:
            continue
        if argument.startswith(f"{_MODEL}="):
            return argument.partition("=")[2]
        is_value = before.startswith("-") and "=" not in before
        if not argument.startswith("-") and (before == _MODEL or not is_value):
            return argument
    return "" if _MODEL in args else None


def _refuse(named: str) -> None:
    if named.endswith((".yaml", ".yml")):
        fail(f"a configuration is named by an option: flotilla serve --config {named}")
    fail(
        "the model is named in a configuration file, as a directory on this machine, and so are other "
        "settings (docs/configuration.md):\n"
        f"  echo 'target: {{path: {named or 'DIRECTORY'}}}' > flotilla.yaml\n"
        "  flotilla serve --config flotilla.yaml"
    )
