"""`flotilla bench`: the benchmark commands."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchmarks import (
    cli_chaos,
    cli_compare,
    cli_dashboards,
    cli_decomposition,
    cli_deepen,
    cli_fidelity,
    cli_forward,
    cli_grpc,
    cli_kills,
    cli_overhead,
    cli_overload,
    cli_pipeline,
    cli_pool,
    cli_regret,
    cli_scaling,
    cli_scheduler,
    cli_soak,
    cli_upcycle,
)
from benchmarks.arrivals import Arrivals
from benchmarks.cli_common import (
    ApiKey,
    JsonFile,
    MaxTokens,
    Prompts,
    PromptsOfEachClass,
    QuantizationOption,
    Seed,
    end_with_differences,
    failed,
)
from benchmarks.cli_vllm import vllm_app

app = typer.Typer(
    help="Measure Flotilla, alone and beside its peers.", no_args_is_help=True, add_completion=False
)

app.add_typer(vllm_app, name="vllm")
app.command()(cli_chaos.chaos)
app.command()(cli_kills.kills)
app.command()(cli_soak.soak)
app.command()(cli_overload.overload)
app.command()(cli_compare.compare)
app.command()(cli_compare.selection)
app.command()(cli_pipeline.pipeline)
app.command()(cli_decomposition.decomposition)
app.command()(cli_deepen.deepen)
app.command()(cli_upcycle.upcycle)
app.command()(cli_fidelity.fidelity)
app.command()(cli_fidelity.acceptance)
app.command()(cli_fidelity.simulator)
app.command()(cli_forward.forward)
app.command()(cli_regret.regret)
app.command()(cli_scaling.scaling)
app.command()(cli_pool.pool)
app.command()(cli_grpc.grpc_cancel)
app.command()(cli_dashboards.dashboards)
app.command()(cli_overhead.overhead)
app.command()(cli_scheduler.scheduler)


def _json_object(text: str | None, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint=option) from None
    if not isinstance(value, dict):
        raise typer.BadParameter("expected a JSON object", param_hint=option)
    return value


@app.command()
def serve(
    url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model id; the server's first if unset.")] = None,
    prompts: Annotated[
        str, typer.Option(help="`zoo` (held-out prompts), a JSONL prompt file or an AdaServe workload file.")
    ] = "zoo",
    mix: Annotated[
        str | None, typer.Option(help="Shares by class, as in `code=60,chat=20,summary=20`.")
    ] = None,
    num_requests: Annotated[int | None, typer.Option(min=1, help="How many; all prompts if unset.")] = None,
    max_tokens: MaxTokens = None,
    arrivals: Annotated[
        Arrivals | None, typer.Option(help="Arrival process; follows from the other options if unset.")
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Mean requests per second; stretches a trace to it.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="Shape of gamma arrivals: 1 is Poisson, below 1 burstier.")
    ] = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option(exists=True, help="Arrival trace: Azure CSV or Mooncake JSONL, also gzipped."),
    ] = None,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most requests at once (8 in a closed loop if unset). One that waits for that is sent late, "
            "which is reported apart and counts in no latency.",
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="Objectives by class: `code:tpot=30,ttft=200` (ms), or relative to a baseline measured "
            "first without speculation: `code:1.2x,chat:2x,summary:4x`. `*` is every other class."
        ),
    ] = None,
    send_slo: Annotated[
        bool, typer.Option(help="Send objectives as `slo`; switch off for servers that refuse it.")
    ] = True,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    extra_body: Annotated[
        str | None, typer.Option(help="JSON object merged into every request body.")
    ] = None,
    baseline_requests: Annotated[int, typer.Option(min=1, help="Per class, for relative objectives.")] = 4,
    warmups: Annotated[int, typer.Option(min=0, help="Requests before measuring.")] = 2,
    seed: Seed = 0,
    api_key: ApiKey = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Longest silence on a stream, in seconds.")] = 300.0,
    details: Annotated[bool, typer.Option(help="Put every request into the JSON file.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Load a running server and report latency, attainment and goodput by class."""
    from aiohttp import ClientError

    from benchmarks import objectives, tables
    from benchmarks import serve as serving

    extra = _json_object(extra_body, "--extra-body")
    try:
        options = serving.ServeOptions(
            url=url,
            model=model,
            source=prompts,
            mix=mix,
            num_requests=num_requests,
            max_tokens=max_tokens,
            arrivals=arrivals,
            request_rate=request_rate,
            burstiness=burstiness,
            trace=trace,
            max_concurrency=max_concurrency,
            slos=objectives.parse_slos(slo or ()),
            send_slo=send_slo,
            sampling={"temperature": temperature, "seed": seed},
            extra_body=extra,
            baseline_requests=baseline_requests,
            num_warmups=warmups,
            seed=seed,
            api_key=api_key,
            timeout_s=timeout,
            details=details,
        )
        record = asyncio.run(serving.run(options))
    except (ValueError, RuntimeError, OSError, ClientError) as error:
        raise failed("serve", error) from None
    tables.write_json(json_file, record)
    if record["report"]["total"]["num_errors"]:
        raise typer.Exit(1)


@app.command()
def engine(
    config: Annotated[
        Path | None, typer.Option(exists=True, help="Cell configuration; the demo family if unset.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(exists=True, help="Cost profile of this machine, for the policy."),
    ] = None,
    prompts: Prompts = "zoo",
    domain: Annotated[list[str] | None, typer.Option(help="Classes to measure; all if unset.")] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once: 1, 8, 32 if unset.")
    ] = None,
    per_domain: Annotated[
        int, typer.Option(min=1, help="Prompts of each class in a run (at least the batch).")
    ] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians over them.")] = 3,
    max_tokens: MaxTokens = None,
    processes: Annotated[
        bool, typer.Option(help="Measure a Ray cell with its worker processes, or all in this process.")
    ] = True,
    url: Annotated[
        str | None, typer.Option(help="Measure a running Flotilla server instead; peers still run here.")
    ] = None,
    api_key: ApiKey = None,
    peers: Annotated[bool, typer.Option(help="Also measure Transformers.")] = True,
    assistant: Annotated[
        list[str] | None, typer.Option(help="Assistant of Transformers' assisted generation; may repeat.")
    ] = None,
    prompt_lookup: Annotated[int, typer.Option(min=1, help="Tokens Transformers' prompt lookup drafts.")] = 8,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="A further policy of this engine to measure, beside the cell's; may repeat."),
    ] = None,
    peer_threads: Annotated[
        int, typer.Option(min=0, help="Torch threads for Transformers; 0 takes the fastest.")
    ] = 0,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Compare this engine with and without speculation and Transformers' ways to generate.

    Exits 1 if outputs differ by more than a near tie.
    """
    import os

    # Before torch is imported: idle threads must not spin while another engine is measured.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from benchmarks import engine_run

    try:
        record = engine_run.run(
            engine_run.EngineOptions(
                config=config,
                profile=profile,
                source=prompts,
                domains=tuple(domain or ()),
                concurrencies=tuple(batch or (1, 8, 32)),
                per_domain=per_domain,
                rounds=rounds,
                max_tokens=max_tokens,
                processes=processes,
                url=url,
                api_key=api_key,
                peers=peers,
                assistants=tuple(assistant or ()),
                prompt_lookup=prompt_lookup,
                policies=tuple(policy or ()),
                peer_threads=peer_threads,
                seed=seed,
                json_file=json_file,
            )
        )
    except (ValueError, RuntimeError, OSError) as error:
        raise failed("engine", error) from None
    end_with_differences(record)


@app.command()
def lossless(
    url: Annotated[str, typer.Option(help="A running Flotilla server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model id; the server's first if unset.")] = None,
    target: Annotated[
        str | None,
        typer.Option(help="The model served, as `zoo:NAME` or a directory; the demo target if unset."),
    ] = None,
    quantization: QuantizationOption = None,
    adapter: Annotated[
        str | None,
        typer.Option(help="LoRA adapter that `--model` names, as `zoo:NAME` or a directory: merged here."),
    ] = None,
    prompts: Prompts = "zoo",
    num_prompts: PromptsOfEachClass = 200,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 16,
    drafters: Annotated[
        str | None,
        typer.Option(help="Drafters to test alone, as `a,b`, or `none`; all of the server's if unset."),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="A further variant as NAME=JSON, merged into bodies; may repeat."),
    ] = None,
    sampling: Annotated[bool, typer.Option(help="Also test seeded sampling.")] = True,
    max_tokens: MaxTokens = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(help="Type in which the server computes: in fewer digits more scores are near ties."),
    ] = "float32",
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Score gap up to which a difference is a near tie; 1e-4 if unset, in bfloat16 and float16 "
            "two units in the last place."
        ),
    ] = None,
    seed: Seed = 0,
    api_key: ApiKey = None,
    json_file: JsonFile = None,
) -> None:
    """Check that outputs through the whole system equal the target's own; exits 1 if any does not."""
    from aiohttp import ClientError

    from benchmarks import lossless as suite
    from benchmarks import tables

    variants = {}
    for text in variant or ():
        name, equals, body = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r} is not NAME=JSON", param_hint="--variant")
        variants[name] = _json_object(body, "--variant")
    options = suite.LosslessOptions(
        url=url,
        model=model,
        source=prompts,
        num_prompts=num_prompts,
        concurrency=concurrency,
        drafters=None if drafters is None else tuple(d for d in drafters.split(",") if d != "none"),
        variants=variants,
        sampling=sampling,
        max_tokens=max_tokens,
        tolerance=tolerance,
        dtype=dtype,
        seed=seed,
        quantization=quantization,
        adapter=adapter,
        api_key=api_key,
        **({} if target is None else {"target": target}),
    )
    try:
        record = asyncio.run(suite.run(options))
    except (ValueError, RuntimeError, OSError, ClientError) as error:
        raise failed("lossless", error) from None
    tables.write_json(json_file, record)
    if record["num_unproven"]:
        raise typer.Exit(1)


@app.command()
def lossless_matrix(
    configuration: Annotated[
        list[str] | None, typer.Option(help="Configurations to serve; all of them if unset. May repeat.")
    ] = None,
    num_prompts: PromptsOfEachClass = 200,
    max_tokens: MaxTokens = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Serve trees, chains, tensor parallel 2, forced preemption ... in turn, and check each."""
    from aiohttp import ClientError

    from benchmarks import lossless_matrix as matrix
    from benchmarks import tables

    names = configuration or list(matrix.CONFIGURATIONS)
    unknown = sorted(set(names) - set(matrix.CONFIGURATIONS))
    if unknown:
        known = ", ".join(f"`{name}`" for name in matrix.CONFIGURATIONS)
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; known: {known}")
    try:
        record = matrix.run(names, num_prompts, max_tokens, seed)
    except (ValueError, RuntimeError, OSError, ClientError) as error:
        raise failed("lossless-matrix", error) from None
    tables.write_json(json_file, record)
    if record["num_unproven"]:
        raise typer.Exit(1)
