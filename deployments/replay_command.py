"""`flotilla replay`: recorded decisions made again, and what came out differently."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from cluster.decisions import DecisionsError, Entry, read_entries
from cluster.replay import Replay, ReplayedStep, Segment
from cluster.replay_report import Comparison, describe


class ReplayFailed(Exception):
    """The record cannot be replayed (to its end); the message says why."""


def run_replay(path: Path, policy: str | None, *, quiet: bool) -> bool:
    """Replay a file and print what came of it.

    Args:
        path: JSON lines, as the server writes them.
        policy: ask this policy instead of the recorded one, and print both side by side.
        quiet: leave out the steps whose decisions are the same, and what was said of a scheduler before.

    Returns:
        whether all decisions are the same.

    Raises:
        ReplayFailed: for a file or policy that is not one; what could be replayed is printed before.
    """
    replay, comparison, names = Replay(policy), Comparison(), []
    problem, seen = "", set[str]()
    try:
        for item in replay.run(_entries(path)):
            if isinstance(item, Segment):
                names.append(str(item.header.policy.get("name", "?")))
                # Cells that write the same file interrupt each other every few steps.
                if not quiet or item.starts_midway or item.header.scheduler not in seen:
                    _print_segment(item)
                seen.add(item.header.scheduler)
                continue
            comparison.add(item)
            _print_step(item, quiet=quiet)
    except DecisionsError as error:
        problem = f"{path}: {error}"
    except ValueError as error:
        raise ReplayFailed(str(error)) from error
    if comparison.num_steps:
        _print_summary(comparison, names, policy)
    if replay.num_missing:
        typer.echo(
            f"{replay.num_missing} calls of the policy are missing in between: one that remembers earlier "
            "steps may have decided differently for that reason"
        )
    if problem:
        raise ReplayFailed(problem)
    return comparison.num_different == 0


def _entries(path: Path) -> Iterator[Entry]:
    try:
        with path.open("rb") as lines:
            yield from read_entries(lines)
    except OSError as error:
        raise ReplayFailed(f"cannot read {path}: {error.strerror}") from error


def _print_segment(segment: Segment) -> None:
    header = segment.header
    recorded = header.policy.get("name", "?")
    asked = "" if recorded == segment.policy.name else f", replayed by {segment.policy.name}"
    typer.echo(f"policy {recorded}{asked}, recorded {header.recorded_at} by Flotilla {header.flotilla}")
    if segment.starts_midway:
        typer.echo(
            f"the record starts mid-way, after {header.first_call} calls of the policy: one that remembers "
            "earlier steps (flotilla and specserve do) may decide differently at first"
        )


def _print_step(step: ReplayedStep, *, quiet: bool) -> None:
    if step.is_same and quiet:
        return
    for line in describe(step):
        typer.echo(line)


def _print_summary(comparison: Comparison, names: list[str], policy: str | None) -> None:
    if policy is None:
        same = comparison.num_steps - comparison.num_different
        typer.echo(f"{comparison.num_steps} steps: {same} the same, {comparison.num_different} different")
        return
    table = Table(title=f"{comparison.num_steps} steps, {comparison.num_different} decided differently")
    recorded = names[0] if len(set(names)) == 1 else f"{len(set(names))} policies"
    table.add_column("")
    table.add_column(f"recorded: {recorded}", justify="right")
    table.add_column(f"replayed: {policy}", justify="right")
    for row in comparison.table():
        table.add_row(*row)
    Console().print(table)
