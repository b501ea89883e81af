"""`flotilla profile`: measures what forwards of the configured models cost, and how well the fit predicts."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster.config import FlotillaConfig
from cluster.profile_file import ModelProfile, ProfileFile
from cluster.profile_measure import measure_profile
from deployments.output_files import check_output
from deployments.preflight import StartError

# Median relative error on held-out forwards that a profile should not exceed.
QUALITY = 0.10
# Shown in place of a cost that a model has not.
NONE = "-"


def run_profile(
    config: FlotillaConfig, out: Path, plot: Path | None = None, console: Console | None = None
) -> ProfileFile:
    """Measure, write the file and the plot, and print a table.

    Raises:
        StartError: if a model cannot be loaded or measured, or a file cannot be written.
    """
    console = console or Console()
    try:
        check_output(out)
        if plot is not None:
            check_output(plot, is_plot=True)
    except ValueError as error:
        raise StartError(str(error)) from None
    try:
        with _Bars(console) as bars:
            profile = measure_profile(config, bars.report)
    except (FileNotFoundError, KeyError, ValueError, RuntimeError) as error:
        raise StartError(f"cannot measure the models: {error.args[0] if error.args else error}") from error
    console.print(table(profile))
    held_out, total = profile.target.quality.num_held_out, len(profile.target.points)
    console.print(
        f"error: median on forwards the fit did not see ({held_out} of {total} of the target), "
        f"at most {QUALITY:.0%} wanted{_legend(profile)}",
        style="dim",
        highlight=False,
    )
    try:
        profile.save(out)
        console.print(
            f"wrote {out}; use it with `profile: {out}` in the configuration", markup=False, highlight=False
        )
        if plot is not None:
            from deployments.profile_plot import plot_profile

            plot_profile(profile, plot)
            console.print(f"wrote {plot}: predicted against measured", markup=False, highlight=False)
    except OSError as error:
        raise StartError(f"cannot write {error.filename or out}: {error.strerror}") from error
    return profile


def _legend(profile: ProfileFile) -> str:
    """What columns mean that only some models have."""
    costs = [model.cost for model in profile.models.values()]
    knee = "; past knee: each token beyond so many in the batch" if any(c.gamma_knee for c in costs) else ""
    return knee + ("; experts: all of a mixture's" if any(c.experts_s for c in costs) else "")


def table(profile: ProfileFile) -> Table:
    """Coefficients and held-out errors, a row per model."""
    clock = "processor time" if profile.clock == "cpu" else "wall time"
    title = f"Forwards on {profile.machine.hardware}, {clock}"
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    rows = {name: _figures(model) for name, model in profile.models.items()}
    shown.add_column("model", no_wrap=True)
    headings = [
        heading for heading in next(iter(rows.values())) if any(row[heading] != NONE for row in rows.values())
    ]
    for heading in headings:
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, row in rows.items():
        shown.add_row(escape(name), *(row[heading] for heading in headings))
    return shown


def _figures(model: ModelProfile) -> dict[str, str]:
    """By heading; `NONE` of what a cost has not: columns of nothing else would take width for nothing."""
    cost, median = model.cost, model.quality.median
    experts = knee = NONE
    if cost.experts_s > 0.0:
        experts = f"{cost.experts_s * 1e3:.2f}"
    if cost.gamma_knee > 0.0:
        knee = f"{(cost.gamma + cost.gamma_knee) * 1e6:.1f} (>{cost.knee_tokens:.0f})"
    return {
        "fixed\nms": f"{cost.delta * 1e3:.3f}",
        "experts\nms": experts,
        "request\nµs": f"{cost.rho * 1e6:.1f}",
        "token\nµs": f"{cost.gamma * 1e6:.1f}",
        "past knee\nµs": knee,
        "context\nns": f"{cost.alpha * 1e9:.1f}",
        "x row\nns": f"{cost.beta * 1e9:.2f}",
        "error": f"[{'green' if median <= QUALITY else 'red'}]{median:.1%}[/]",
    }


class _Bars:
    """A progress bar per model."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        self._progress.start()
        self._loading = self._progress.add_task("loading", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def report(self, name: str, done: int, total: int) -> None:
        """So many of a model's forwards are measured."""
        if name not in self._tasks:
            self._progress.update(self._loading, visible=False)
            for task in self._tasks.values():  # a time limit may have ended them early
                self._progress.update(task, completed=self._progress.tasks[task].total)
            self._tasks[name] = self._progress.add_task(escape(name), total=total)
        self._progress.update(self._tasks[name], completed=done, total=total)
