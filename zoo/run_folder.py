"""A run's folder: whose target it has, what is finished, where models and figures go."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from zoo.progress import stage
from zoo.registry import TARGET, WEIGHTS

if TYPE_CHECKING:
    from zoo.evaluate import Reading

#: In a folder of models: what was measured of them.
FIGURES = "evaluation.json"


def made(folder: Path | None) -> Path | None:
    """Of an option, a folder that is written to, if only in the end: it is made now.

    Raises:
        typer.BadParameter: if it cannot be, or nothing can be written to it.
    """
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"cannot make the folder {folder}: {error.strerror}") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise typer.BadParameter(f"cannot write to the folder {folder}")
    return folder


def is_finished(out: Path, name: str, console: Console) -> bool:
    """Whether the run has the finished model already; it is said that it stays."""
    if not (out / name / "model" / "model.safetensors").exists():
        return False
    console.print(
        f"{name} in {out} is finished and stays as it is; name another folder to train it anew",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return True


def find_target(out: Path, console: Console, *, shipped: bool) -> None:
    """Make sure that the run in ``out`` has a trained target; if asked to, the shipped one and the corpus.

    Raises:
        typer.BadParameter: if it has none, or one that the shipped one would replace.
    """
    if shipped:
        from zoo import prepare, tokenizer

        if (out / TARGET / "model").exists() and not has_shipped_target(out):
            # It would be written over, and its answers, which are kept, would be taken for the other's.
            raise typer.BadParameter(
                f"{out} has a target of its own; name another folder for the shipped one", param_hint="--out"
            )
        with stage(console, "reading the corpus"):
            prepare.prepare(out, WEIGHTS / TARGET)
        own, taught = (tokenizer.load(folder) for folder in (out / "tokenizer", WEIGHTS / TARGET))
        if own.get_vocab() != taught.get_vocab():
            raise typer.BadParameter(
                f"the data in {out} are in another tokenizer than the shipped target's; name another folder",
                param_hint="--out",
            )
        shutil.copytree(WEIGHTS / TARGET, out / TARGET / "model", dirs_exist_ok=True)
    if not (out / TARGET / "model").exists():
        raise typer.BadParameter(
            f"no trained target in {out}; run `flotilla zoo train` first, or say --shipped",
            param_hint="--out",
        )


def has_shipped_target(out: Path) -> bool:
    """Whether the target of the run in ``out`` is the shipped one."""
    from engine.heads_config import weights_digest

    return weights_digest(out / TARGET / "model") == weights_digest(WEIGHTS / TARGET)


def publish_beside_target(trained: Path, name: str, out: Path, weights: Path) -> None:
    """Copy what was trained for the target of the run in ``out``, and that target where there is none: the
    one is measured on the other.
    """
    from zoo import publish

    if not (weights / TARGET).exists():
        publish.copy(TARGET, out, weights)
    shutil.copytree(trained, weights / name, dirs_exist_ok=True)


def missing(names: Iterable[str], weights: Path) -> str:
    """Those of the named models that are not in the folder, as text."""
    return ", ".join(name for name in names if not (weights / name / "config.json").exists())


def figures(json_file: Path) -> dict[str, Any]:
    """The figures in the file, none where there is no file.

    Raises:
        typer.BadParameter: if it is no such file.
    """
    if not json_file.exists():
        return {}
    try:
        found = json.loads(json_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise typer.BadParameter(f"{json_file} is not JSON: {error}", param_hint="--json") from None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{json_file} has no figures by name", param_hint="--json")
    return found


def measured(
    part: str,
    measure: Callable[[Reading, Path], dict[str, Any]],
    weights: Path,
    json_file: Path,
    console: Console,
) -> dict[str, Any]:
    """What ``measure`` finds on the held-out prompts, added to the figures in the file as ``part``."""
    from zoo import evaluate as evaluation

    with stage(console, f"measuring: {part}"):
        found = measure(evaluation.read(weights, samples=0), weights)
    evaluation.write({**figures(json_file), part: found}, json_file)
    return found
