"""The `flotilla` command. What a command needs is imported when it runs, so that `--help` is instant."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.batch_command import batch
from deployments.command_failure import fail
from deployments.command_group import CommandGroup
from deployments.drafters_command import app as drafters_app
from deployments.keys_command import app as keys_app
from deployments.lasting_output import lasting_output
from deployments.rollout_command import rollout
from deployments.serve_arguments import ServeCommand

if TYPE_CHECKING:
    from cluster.config import FlotillaConfig

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

#: Passes everything behind the command's name on, `--help` included.
_FORWARD: dict[str, Any] = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML configuration; the embedded demo models if unset.")
]
PolicyOption = Annotated[str | None, typer.Option(help="Speculation policy.")]
DraftersOption = Annotated[
    str | None, typer.Option(help="Only these drafters of the configuration, by name: `a,b`, or `none`.")
]
TensorParallelOption = Annotated[int | None, typer.Option(min=1, help="Ranks of the target model.")]
DtypeOption = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16, of all models.")]
AdapterOption = Annotated[
    list[str] | None,
    typer.Option(help="A LoRA adapter to serve besides, as NAME=DIRECTORY; may repeat.", metavar="NAME=PATH"),
]


def _show_version(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def main(
    *,
    is_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """SLO-customized speculative decoding on Ray."""


@app.command(cls=ServeCommand)
def serve(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; loopback if unset.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; 0 for any free one.")] = None,
    policy: PolicyOption = None,
    drafters: DraftersOption = None,
    tensor_parallel: TensorParallelOption = None,
    dtype: DtypeOption = None,
    adapter: AdapterOption = None,
) -> None:
    """Serve models over an OpenAI-compatible HTTP API."""
    settings = load_config(config, host, port, policy, drafters, tensor_parallel, dtype, adapter or ())
    from deployments import preflight

    try:
        preflight.check(settings)  # before the seconds that the next import takes
        if "RAY_ADDRESS" not in os.environ:
            # Ray reads it when imported; despite its name it puts a Ray of our own on loopback everywhere.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        from deployments import serving

        def reload() -> FlotillaConfig:
            try:
                wanted = load_config(
                    config, host, port, policy, drafters, tensor_parallel, dtype, adapter or ()
                )
            except typer.Exit:  # what is wrong has been said
                raise preflight.StartError("nothing is changed") from None
            for warning in preflight.check(wanted, listens=False):
                typer.echo(f"warning: {warning}", err=True)
            return wanted

        with lasting_output():
            serving.run(settings, reload=reload)
    except preflight.StartError as error:
        fail(str(error))


@app.command()
def profile(
    json: Annotated[Path, typer.Option(help="Where the cost profile is written.")] = Path("profile.json"),
    plot: Annotated[
        Path | None, typer.Option(help="Plot predicted against measured into this file, a .png or .svg.")
    ] = None,
    config: ConfigOption = None,
    drafters: DraftersOption = None,
    tensor_parallel: TensorParallelOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Measure what forwards of the target and the drafters cost on this machine."""
    settings = load_config(config, None, 0, None, drafters, tensor_parallel, dtype)
    from deployments import preflight

    try:
        preflight.check(settings.model_copy(update={"profile": None}))
        from deployments.profile_cli import run_profile

        run_profile(settings, json, plot)
    except preflight.StartError as error:
        fail(str(error))


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model id; the server's first if unset.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.7,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Objective: time per output token.")] = None,
    ttft_ms: Annotated[float | None, typer.Option(help="Objective: time to the first token.")] = None,
    tier: Annotated[str | None, typer.Option(help="Service tier; the server's default if unset.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes answers repeatable.")] = None,
) -> None:
    """Chat in the terminal, with the receipt under every answer."""
    from deployments.chat_client import ChatOptions, run_chat

    slo = {name: value for name, value in (("tpot_ms", tpot_ms), ("ttft_ms", ttft_ms)) if value is not None}
    options = ChatOptions(
        url=url,
        model=model,
        system=system,
        temperature=temperature,
        max_tokens=max_tokens,
        slo=slo,
        tier=tier,
        seed=seed,
    )
    raise typer.Exit(run_chat(options))


app.command()(batch)


@app.command(**_FORWARD)
def bench(context: typer.Context) -> None:
    """Measure Flotilla, alone and beside its peers."""
    _forward(context, "benchmarks.cli", "bench")


@app.command(**_FORWARD)
def simulate(context: typer.Context) -> None:
    """Simulate a cell, or `simulate fleet` of them, on hardware you need not have: the same scheduler."""
    if context.args[:1] == ["fleet"]:
        context.args.pop(0)
        _forward(context, "simulator.fleet.cli", "simulate fleet")
    else:
        _forward(context, "simulator.cli", "simulate")


@app.command(**_FORWARD)
def plan(context: typer.Context) -> None:
    """Cells, GPUs and a Helm values file for a request rate and its objectives, from the simulator."""
    _forward(context, "simulator.plan_cli", "plan")


@app.command(**_FORWARD)
def reproduce(context: typer.Context) -> None:
    """The papers' figures in the simulator, and what came of their claims."""
    _forward(context, "simulator.reproduction.cli", "reproduce")


@app.command(**_FORWARD)
def zoo(context: typer.Context) -> None:
    """Train, measure and inspect the embedded demo models."""
    _forward(context, "zoo.cli", "zoo")


app.add_typer(drafters_app, name="drafters")
app.add_typer(keys_app, name="keys")
app.command()(rollout)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="JSON lines of `debug.decisions_file` or /debug/decisions.")],
    policy: Annotated[str | None, typer.Option(help="Ask this policy instead, side by side.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only steps that differ.")] = False,
) -> None:
    """Make recorded decisions again; exits 1 if the recorded policy decides differently."""
    from deployments.replay_command import ReplayFailed, run_replay

    try:
        is_same = run_replay(file, policy, quiet=quiet)
    except ReplayFailed as error:
        fail(str(error))
    if not is_same and policy is None:
        raise typer.Exit(1)


@app.command()
def timeline(
    url: Annotated[str, typer.Option(help="A Flotilla server.")] = "http://127.0.0.1:8000",
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the trace is written.")] = Path(
        "timeline.json"
    ),
) -> None:
    """Fetch who worked when (`debug.timeline`), a trace for https://ui.perfetto.dev or chrome://tracing."""
    from deployments.timeline_command import TimelineFailed, fetch_timeline

    try:
        fetch_timeline(url, output)
    except TimelineFailed as error:
        fail(str(error))


@app.command()
def dashboards(
    out: Annotated[Path, typer.Option(help="Directory; gets dashboards/*.json and rules/*.yaml.")],
    slo_target: Annotated[
        float, typer.Option(help="Share of requests that are to attain objectives.")
    ] = 0.95,
    tier_target: Annotated[
        list[str] | None, typer.Option(help="Another share for a tier, as in interactive=0.99.")
    ] = None,
    runbooks: Annotated[str, typer.Option(help="Where docs/runbooks can be read; alerts link to it.")] = (
        "docs/runbooks"
    ),
    job: Annotated[
        str, typer.Option(help="The job that rules are about, where several systems are scraped.")
    ] = "",
) -> None:
    """Write Grafana dashboards, Prometheus recording rules and alerts."""
    from deployments.dashboards.command import DashboardsFailed, generated, parse_targets, write

    try:
        files = generated(parse_targets(slo_target, tier_target or ()), runbooks, job)
        for path in write(out, files):
            typer.echo(path)
    except DashboardsFailed as error:
        fail(str(error))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    typer.echo(installed("flotilla"))


def load_config(
    path: Path | None,
    host: str | None = None,
    port: int | None = None,
    policy: str | None = None,
    drafters: str | None = None,
    tensor_parallel: int | None = None,
    dtype: str | None = None,
    adapters: Sequence[str] = (),
) -> FlotillaConfig:
    """The configuration of a file, or the demo's, with the command line's changes; exits 2 if it is wrong."""
    import yaml
    from pydantic import ValidationError

    from cluster.config import FlotillaConfig
    from cluster.config_errors import wrong_fields
    from deployments.demo import demo_config

    try:
        base = demo_config() if path is None else FlotillaConfig.load(path)
        tree = base.model_dump(mode="json")
        _override(tree["http"], host=host, port=port)
        _override(tree["policy"], name=policy)
        _override(tree["target"], tensor_parallel=tensor_parallel, dtype=dtype)
        tree["target"]["adapters"] += map(_adapter, adapters)
        if drafters is not None:
            tree["drafters"] = _chosen(tree["drafters"], drafters)
        for drafter in tree["drafters"]:
            if drafter["kind"] == "model":
                _override(drafter, dtype=dtype)
        return FlotillaConfig.model_validate(tree)
    except ValidationError as error:
        lines = wrong_fields(error, whole="configuration", model=FlotillaConfig)
        fail("\n  ".join([f"{path or 'the options'}: the configuration is wrong", *lines]))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        fail(f"cannot read {path}: {error}")


def _override(section: dict[str, Any], **values: Any) -> None:
    section.update({name: value for name, value in values.items() if value is not None})


def _adapter(text: str) -> dict[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        fail(f"--adapter {text}: say NAME=DIRECTORY, such as terse=zoo:lora-terse-8x384")
    return {"name": name, "path": path}


def _chosen(drafters: list[dict[str, Any]], names: str) -> list[dict[str, Any]]:
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if wanted == ["none"]:
        return []
    if not wanted:  # as of a variable that is not set
        fail("--drafters names nobody; to serve without drafters, say `none`")
    by_name = {drafter["name"]: drafter for drafter in drafters}
    unknown = [name for name in wanted if name not in by_name]
    if unknown:
        fail(f"--drafters: no drafter called {', '.join(unknown)}; there are {', '.join(by_name) or 'none'}")
    return [by_name[name] for name in wanted]


def _forward(context: typer.Context, module: str, command: str) -> None:
    """Hand the arguments to another package's command line, loaded only now."""
    # By name: imports point downwards, and these packages sit on top or beside.
    try:
        sub_app = importlib.import_module(module).app
    except ModuleNotFoundError as error:
        fail(f"`flotilla {command}` is not installed here: {error}")
    sub_app(args=context.args, prog_name=f"flotilla {command}")


if __name__ == "__main__":
    app()
