"""`flotilla keys`: make API keys, and see those of a keys file (docs/security.md)."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.command_failure import fail

app = typer.Typer(help="Make API keys, and see those of a keys file.", no_args_is_help=True)


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="For people; must differ among the keys of a file.")],
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="Keys file the hash is added to; printed as YAML if unset."),
    ] = None,
    permission: Annotated[
        list[str] | None, typer.Option(help="api, metrics, debug or admin; api if unset. May be repeated.")
    ] = None,
    tier: Annotated[
        list[str] | None, typer.Option(help="Service tier it may ask for; all if unset. May be repeated.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Model it sees and may ask; all if unset. May be repeated.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Requests per minute.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Tokens per minute.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Requests open at once.")] = None,
) -> None:
    """Make a key, and print it: once, to standard output; only its hash is kept."""
    from deployments.api_keys import hash_key, new_key

    key = new_key()
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
    }
    entry: dict[str, Any] = {"name": name, "hash": hash_key(key)}
    entry |= {"permissions": permission} if permission else {}
    entry |= {"tiers": tier} if tier else {}
    entry |= {"models": model} if model else {}
    entry |= {"limits": {k: v for k, v in limits.items() if v is not None}} if any(limits.values()) else {}
    if file is None:
        typer.echo(f"# For security.keys_file:\n{_added(None, entry)}", err=True)
        typer.echo(key)
        return
    with _changing(file):
        _tell_and_keep(key, file, _added(file, entry))


@app.command("hash")
def hash_command() -> None:
    """Print the hash of a key of yours, read from standard input."""
    import sys

    from deployments.api_keys import WeakKey, hash_key

    # Not an argument: those end up in the shell's history, and anybody on the machine sees them.
    key = typer.prompt("Key", hide_input=True) if sys.stdin.isatty() else sys.stdin.readline().strip()
    try:
        typer.echo(hash_key(key))
    except WeakKey as error:
        fail(str(error))


@app.command("list")
def list_keys(
    file: Annotated[Path, typer.Argument(help="A keys file.")],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """The keys of a file: names, permissions, tiers, models and limits."""
    import json

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from cluster.security_config import KeysFile

    try:
        keys = KeysFile.load(file).keys
    except ValueError as error:
        fail(str(error))
    if as_json:
        typer.echo(json.dumps([key.model_dump(exclude={"hash"}) for key in keys], indent=1))
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("key", "permissions", "tiers", "models", "requests/min", "tokens/min", "at once"):
        table.add_column(heading)
    for key in keys:
        limits = key.limits
        numbers = (limits.requests_per_minute, limits.tokens_per_minute, limits.max_concurrent)
        tiers, models = (
            "all" if some is None else escape(", ".join(some)) for some in (key.tiers, key.models)
        )
        shown = ("-" if number is None else str(number) for number in numbers)
        table.add_row(key.name, ", ".join(key.permissions), tiers, models, *shown)
    Console(highlight=False).print(table)


def _added(file: Path | None, entry: dict[str, Any]) -> str:
    """The text of a keys file with one more key; exits 2 if that would be wrong."""
    import yaml
    from pydantic import ValidationError

    from cluster.config_errors import wrong_fields
    from cluster.security_config import KeysFile

    keys: list[Any] = []
    try:
        if file is not None and file.exists():
            keys = [key.model_dump(mode="json", exclude_defaults=True) for key in KeysFile.load(file).keys]
        checked = KeysFile.model_validate({"keys": [*keys, entry]})
    except ValidationError as error:
        fail("; ".join(wrong_fields(error, whole=str(file or "the key"), skip=2)))
    except OSError as error:
        fail(f"cannot read the keys in {file}: {error.strerror}")
    except ValueError as error:
        fail(str(error))
    data = [key.model_dump(mode="json", exclude_defaults=True) for key in checked.keys]
    return str(yaml.safe_dump({"keys": data}, sort_keys=False))


@contextmanager
def _changing(file: Path) -> Iterator[None]:
    """One command at a time: of two, the later would write back the keys that the earlier found."""
    try:
        directory = os.open(Path(os.path.realpath(file)).parent, os.O_RDONLY)
    except OSError as error:
        fail(f"cannot write {file}: {error.strerror}")
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _tell_and_keep(key: str, file: Path, text: str) -> None:
    """Print a key, and only then replace the file: a key that nobody saw is not kept."""
    path = Path(os.path.realpath(file))  # a link stays one
    # At once, so that a server that reads it meanwhile finds it whole.
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with _fails_for(file):
            _write_as(path, beside, text)
        typer.echo(key)
        with _fails_for(file):
            beside.replace(path)
        typer.echo(f"Its hash is in {file}. The key itself is not kept anywhere.", err=True)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def _fails_for(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fail(f"cannot write {file}: {error.strerror}")


def _write_as(path: Path, beside: Path, text: str) -> None:
    """Write a file that whoever may read `path` may read; its owner alone if there is none."""
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(text)
        if not path.exists():
            return
        before = path.stat()
        for owner, group in ((before.st_uid, -1), (-1, before.st_gid)):
            with suppress(PermissionError):  # not everybody may give a file away
                os.fchown(opened.fileno(), owner, group)
        os.fchmod(opened.fileno(), stat.S_IMODE(before.st_mode))
