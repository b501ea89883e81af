"""`flotilla bench vllm`: the comparison with vLLM, and its installation."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli_common import JsonFile, MaxTokens, Prompts, Seed, end_with_differences, failed

vllm_app = typer.Typer(
    help="Measure this server beside vLLM's CPU build, on the same weights, prompts and client.",
    invoke_without_command=True,
)

VllmVenv = Annotated[Path, typer.Option(help="Virtual environment that vLLM is installed into.")]
DEFAULT_VENV = Path("~/.cache/flotilla/vllm").expanduser()


@vllm_app.callback()
def vllm(
    context: typer.Context,
    venv: VllmVenv = DEFAULT_VENV,
    config: Annotated[
        Path | None, typer.Option(exists=True, help="Our cell's configuration; the demo family if unset.")
    ] = None,
    prompts: Prompts = "zoo",
    mode: Annotated[
        list[str] | None, typer.Option(help="vLLM's modes: base, ngram, draft; all if unset.")
    ] = None,
    streams: Annotated[list[int] | None, typer.Option(min=1, help="Requests at once: 1, 8 if unset.")] = None,
    per_domain: Annotated[int, typer.Option(min=1, help="Prompts of each class in a run.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians over them.")] = 5,
    max_tokens: MaxTokens = None,
    draft_model: Annotated[str | None, typer.Option(help="vLLM's draft model; our general drafter.")] = None,
    num_speculative_tokens: Annotated[int, typer.Option(min=1, help="Tokens vLLM drafts a step.")] = 4,
    adapter: Annotated[
        str | None,
        typer.Option(help="A LoRA adapter that all requests ask of both, as `zoo:NAME` or a directory."),
    ] = None,
    eager: Annotated[
        bool, typer.Option(help="vLLM without compilation: starts sooner, runs slower.")
    ] = False,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure this server beside vLLM's CPU build, on the same weights, prompts and client.

    Exits 1 if outputs differ by more than a near tie.
    """
    if context.invoked_subcommand is not None:
        return
    from benchmarks import tables, vllm_peer

    # Named twice, one takes part once.
    modes = tuple(dict.fromkeys(mode or vllm_peer.MODES))
    unknown = sorted(set(modes) - set(vllm_peer.MODES))
    if unknown:
        known = ", ".join(vllm_peer.MODES)
        raise typer.BadParameter(f"{', '.join(unknown)}: none of {known}", param_hint="--mode")
    options = vllm_peer.VllmOptions(
        venv=venv.expanduser().absolute(),
        config=config,
        source=prompts,
        modes=modes,
        concurrencies=tuple(streams or (1, 8)),
        per_domain=per_domain,
        rounds=rounds,
        max_tokens=max_tokens,
        num_speculative_tokens=num_speculative_tokens,
        eager=eager,
        seed=seed,
        adapter=adapter,
    )
    if draft_model is not None:
        options = replace(options, draft_model=draft_model)
    # As an interrupt does, being told to end must take the servers down with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        record = vllm_peer.run(options)
    except (ValueError, RuntimeError, OSError) as error:
        raise failed("vllm", error) from None
    tables.write_json(json_file, record)
    end_with_differences(record)


@vllm_app.command("install")
def vllm_install(venv: VllmVenv = DEFAULT_VENV) -> None:
    """Only install vLLM's CPU build (minutes, 3.5 GB)."""
    from benchmarks import vllm_install as installer

    try:
        installer.install(venv.expanduser().absolute())
    except (RuntimeError, OSError) as error:
        raise failed("vllm install", error) from None


@vllm_app.command("answers")
def vllm_answers(
    venv: VllmVenv = DEFAULT_VENV,
    config: Annotated[
        Path | None, typer.Option(exists=True, help="Our cell's configuration; the demo family if unset.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Send both servers the same requests, by field, right and wrong; say how answers differ, and why.

    Ends with 1 if a difference has no reason (`benchmarks/vllm_known_differences.py`).
    """
    from benchmarks import tables, vllm_answers

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        record = vllm_answers.run(venv.expanduser().absolute(), config)
    except (ValueError, RuntimeError, OSError) as error:
        raise failed("vllm answers", error) from None
    tables.write_json(json_file, record)
    if any(one["reason"] is None for entry in record["answers"] for one in entry["differences"]):
        raise typer.Exit(1)
