"""What the benchmark commands' options have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from deployments.output_files import check_output


def to_write(path: Path | None) -> Path | None:
    """The file that an option names, if it can be made: a measurement of an hour ends by writing it.

    Raises:
        BadParameter: if it cannot.
    """
    return _checked(path)


def to_draw(path: Path | None) -> Path | None:
    """As `to_write`, of a plot.

    Raises:
        BadParameter: if it cannot be made, or is of no format of plots.
    """
    return _checked(path, is_plot=True)


def _checked(path: Path | None, *, is_plot: bool = False) -> Path | None:
    try:
        if path is not None:
            check_output(path, is_plot=is_plot)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return path


JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write all figures to this file.", callback=to_write)
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the workload.")]
#: Of servers with keys: not in records.
ApiKey = Annotated[
    str | None, typer.Option(envvar=["OPENAI_API_KEY", "FLOTILLA_API_KEY"], help="Bearer token.")
]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Bound on every answer's tokens.")]
Prompts = Annotated[str, typer.Option(help="`zoo` or a prompt file.")]
PromptsOfEachClass = Annotated[int, typer.Option(min=1, help="Prompts, equally many of each class.")]
Plot = Annotated[Path | None, typer.Option(help="Write the plot to this file.", callback=to_draw)]
QuantizationOption = Annotated[
    Literal["fp8", "int4"] | None, typer.Option(help="The target's weights in eight or in four bits.")
]
# Of the commands that start a system, load it and watch it.
LoadShare = Annotated[float, typer.Option(min=0.05, max=2.0, help="Share of the saturated request rate.")]
Rate = Annotated[float, typer.Option(min=0.0, help="Requests per second in place of --load.")]
SaturationS = Annotated[float, typer.Option(min=2.0, help="Seconds in which saturation is measured.")]
NumDistinct = Annotated[int, typer.Option(min=14, help="Distinct requests.")]
DistinctMaxTokens = Annotated[int, typer.Option(min=8, help="Bound on every answer's tokens.")]
Cells = Annotated[int, typer.Option(min=1, help="Cells.")]
FrontEnds = Annotated[int, typer.Option(min=1, help="Front ends.")]
TensorParallel = Annotated[int, typer.Option(min=1, help="Ranks of each target.")]
ServedConfig = Annotated[
    Path | None, typer.Option(exists=True, help="Serve this configuration in place of the demo family.")
]
_SAID_BY_CONFIG = ("cells", "front_ends", "tensor_parallel", "policy")
ServerLogs = Annotated[Path, typer.Option(help="Folder for the server's log.")]


def check_served(context: typer.Context, config: Path | None) -> None:
    """Refuse options of what is served beside a configuration, which is served as it is.

    Raises:
        BadParameter: for such an option.
    """
    sources = {name: context.get_parameter_source(name) for name in _SAID_BY_CONFIG}
    given = [f"--{name.replace('_', '-')}" for name, of in sources.items() if of and of.name == "COMMANDLINE"]
    if config is not None and given:
        raise typer.BadParameter(
            f"{', '.join(given)}: the configuration says it; leave out one of the two", param_hint="--config"
        )


def write_plot(draw: Callable[[dict[str, Any], Path], None], record: dict[str, Any], path: Path) -> None:
    """Draw a record's plot, and say where it is."""
    from benchmarks import tables

    draw(record, path)
    tables.console.print(f"Wrote {path}.")


def end_with_differences(record: Mapping[str, Any]) -> None:
    """End with status 1 if outputs of a record differ by more than a near tie."""
    if any(not difference["proven"] for difference in record["differences"]):
        raise typer.Exit(1)


def failed(command: str, error: Exception) -> typer.Exit:
    """Say what went wrong, and give the exception that ends the command with status 2."""
    typer.secho(f"flotilla bench {command}: {error}", fg="red", err=True)
    return typer.Exit(2)


def write_demo_cell(out: Path, num_parameters: int, command: str) -> None:
    """Write `out`/cell.yaml, the demo family with the target in `out`, and say how `command` takes it."""
    import yaml

    from benchmarks import tables
    from deployments.demo import demo_config

    demo = demo_config()
    config = {
        "target": demo.target.model_dump(exclude_defaults=True) | {"path": str(out.resolve())},
        "drafters": [{"kind": one.kind} | one.model_dump(exclude_defaults=True) for one in demo.drafters],
    }
    (out / "cell.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    tables.console.print(f"{num_parameters / 1e6:.0f} million parameters in {out}")
    tables.console.print(f"{command} --config {out / 'cell.yaml'}", highlight=False)
