"""`flotilla batch`: the requests of a file are sent, and their answers written into another."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deployments.command_failure import fail

if TYPE_CHECKING:
    from deployments.batch_client import BatchOptions, BatchProgress
    from deployments.batch_file import BatchOutput, BatchRequest

_TROUBLE_CHARACTERS = 60


def batch(
    requests: Annotated[Path, typer.Argument(metavar="INPUT.jsonl", help="OpenAI's Batch format.")],
    answers: Annotated[Path, typer.Argument(metavar="OUTPUT.jsonl", help="Is appended to.")],
    url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    concurrency: Annotated[int, typer.Option(min=1, help="Most requests to have open at once.")] = 64,
    tier: Annotated[str | None, typer.Option(help="Service tier of requests that name none.")] = None,
    priority: Annotated[
        int, typer.Option(help="Of requests that name none; above 0 later than others, 0 sends none.")
    ] = 10,
    model: Annotated[
        str | None, typer.Option(help="Model of requests that name none; the server's first if unset.")
    ] = None,
) -> None:
    """Have a file of requests answered by a server, when it has the time.

    Answers are appended to OUTPUT as they come. While the server is full or away, requests wait.

    The same command again sends what has no 200 in OUTPUT yet; the last line of a custom_id counts.

    Exits 1 if requests failed, 2 if nothing could be sent.
    """
    from deployments.batch_client import BatchOptions, BatchProgress, BatchStopped
    from deployments.batch_file import BatchFileError, BatchOutput, read_requests

    options = BatchOptions(url=url, concurrency=concurrency, tier=tier, priority=priority, model=model)
    try:
        wanted = read_requests(requests)
        if _is_same(answers, requests):
            fail(f"{answers} cannot be both the requests and the answers")
        with BatchOutput(answers) as output:
            left = [request for request in wanted if request.custom_id not in output.answered]
            progress = BatchProgress(len(left))
            started = time.monotonic()
            if left:
                asyncio.run(_send(left, output, options, progress))
    except (BatchFileError, BatchStopped) as error:
        fail(str(error))
    except KeyboardInterrupt:
        typer.secho(f"Interrupted; the same command goes on from {answers}.", err=True)
        raise typer.Exit(130) from None
    typer.echo(_summary(progress, len(wanted), answers, time.monotonic() - started))
    if progress.num_failed:
        raise typer.Exit(1)


def _is_same(answers: Path, requests: Path) -> bool:
    try:
        return answers.samefile(requests)
    except OSError:  # there are none yet, or they cannot be: writing them says why
        return False


async def _send(
    requests: list[BatchRequest], output: BatchOutput, options: BatchOptions, progress: BatchProgress
) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from deployments.batch_client import send_batch

    console = Console(stderr=True)
    # Not markup: what a server says may have brackets.
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    started = time.monotonic()
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=progress.total)

        def show() -> None:
            seconds = time.monotonic() - started
            bar.update(task, completed=progress.num_ended, description=describe(progress, seconds))

        await send_batch(requests, output.append, options, progress, show)


def describe(progress: BatchProgress, seconds: float) -> str:
    """One line about a batch that is being sent."""
    parts = [f"{progress.num_failed} failed"] if progress.num_failed else []
    parts.append(f"{progress.num_tokens / max(seconds, 1e-9):,.0f} tokens/s")
    if progress.num_waiting:
        parts.append(f"{progress.num_waiting} waiting ({_in_short(progress.trouble, _TROUBLE_CHARACTERS)})")
    return " · ".join(parts)


def _in_short(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _summary(progress: BatchProgress, num_wanted: int, path: Path, seconds: float) -> str:
    had = num_wanted - progress.total
    if not progress.total:
        return f"All {num_wanted} requests have answers in {path} already"
    before = f", {had} before" if had else ""
    failed = f"{progress.num_failed} failed"
    if progress.num_failed:
        failed += f"; the same command sends those again (the first: {_in_short(progress.failure, 300)})"
    return (
        f"Wrote {path}: {progress.num_answered} answered{before}, {failed}. "
        f"{progress.num_tokens:,} tokens in {seconds:.1f} s"
    )
