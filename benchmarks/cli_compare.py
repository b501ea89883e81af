"""`flotilla bench compare` and `flotilla bench selection`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli_common import JsonFile, MaxTokens, Seed, failed, to_write


def compare(
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="A policy, with settings as in `fixed:fixed_depth=2` or `autoregressive:batching=priority`; "
            "`all` is every policy. May repeat; one of each kind if unset."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(exists=True, help="Cell configuration; the demo family if unset.")
    ] = None,
    workload: Annotated[
        str, typer.Option(help="`zoo` (held-out prompts), a prompt file, or an AdaServe workload file.")
    ] = "zoo",
    rate: Annotated[
        list[str] | None,
        typer.Option(
            help="Requests per second (`4`), or a share of the saturation throughput without speculation "
            "(`0.5x`), measured first. May repeat; from idle to saturation if unset."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Rounds, each with requests of its own seed.")] = 3,
    duration: Annotated[
        float | None,
        typer.Option(
            min=1, help="Seconds of arrivals in a run: 20, or all of a workload file with arrivals, if unset."
        ),
    ] = None,
    start: Annotated[
        float, typer.Option(min=0, help="Second of a workload file's arrivals at which to begin.")
    ] = 0.0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests in a run, instead of a duration.")
    ] = None,
    mix: Annotated[
        str | None,
        typer.Option(help="Shares by class; `code=60,chat=20,summary=20` for the zoo, else the file's own."),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="Objectives by class, as for `bench serve`; `code:1.2x,chat:1.5x,summary:4.5x` if unset, or "
            "what the workload says."
        ),
    ] = None,
    slo_scale: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01,
            help="Objective of the urgent class over the baseline latency (AdaServe figure 11: 0.6 to 1.6). "
            "May repeat.",
        ),
    ] = None,
    urgent_share: Annotated[
        list[float] | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of the urgent class (AdaServe figure 10: 0.1 to 0.9). May repeat.",
        ),
    ] = None,
    urgent: Annotated[
        str | None, typer.Option(help="The urgent class; `code`, else the first of the mix, if unset.")
    ] = None,
    peaks: Annotated[
        bool, typer.Option("--peaks", help="Classes peak one after the other (AdaServe figures 13, 14).")
    ] = False,
    max_tokens: MaxTokens = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    warmups: Annotated[int, typer.Option(min=1, help="Requests before each run, not measured.")] = 8,
    baseline_requests: Annotated[int, typer.Option(min=1, help="Per class, for the baseline latency.")] = 6,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds after which a request counts as failed.")
    ] = 300.0,
    plots: Annotated[Path | None, typer.Option(file_okay=False, help="Directory for plots.")] = None,
    seed: Seed = 0,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            callback=to_write,
            help="File for all figures. Finished runs are added as they end, and skipped when it is there.",
        ),
    ] = None,
) -> None:
    """Compare policies side by side on one warm cell; exits 1 if outputs differ without a proven reason."""
    import os

    # Before torch is imported: idle threads must not spin beside what is measured.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from benchmarks import compare as comparison
    from benchmarks import compare_outputs
    from benchmarks.compare_plan import DEFAULT_POLICIES, parse_rate
    from cluster.policies.registry import POLICIES

    policies = [
        name for text in policy or DEFAULT_POLICIES for name in (POLICIES if text == "all" else [text])
    ]
    try:
        record = comparison.run(
            comparison.CompareOptions(
                policies=tuple(policies),
                config=config,
                source=workload,
                rates=tuple(map(parse_rate, rate or ())),
                urgent_shares=tuple(urgent_share or ()),
                slo_scales=tuple(slo_scale or ()),
                mix=mix,
                slos=tuple(slo or ()),
                urgent=urgent,
                peaks=peaks,
                seeds=tuple(range(seed, seed + seeds)),
                start_s=start,
                duration_s=duration,
                num_requests=requests,
                max_tokens=max_tokens,
                temperature=temperature,
                warmups=warmups,
                baseline_requests=baseline_requests,
                timeout_s=timeout,
                json_file=json_file,
                plots=plots,
            )
        )
    except (ValueError, RuntimeError, OSError) as error:
        raise failed("compare", error) from None
    _, _, unproven = compare_outputs.count(record.runs, record.outputs)
    if unproven:
        raise typer.Exit(1)


def selection(
    policy: Annotated[list[str] | None, typer.Option(help="Policies; all if unset. May repeat.")] = None,
    requests: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests in the batch: 256 and 64 if unset.")
    ] = None,
    candidates: Annotated[int, typer.Option(min=1, help="Candidate nodes of each request.")] = 64,
    budget: Annotated[
        int,
        typer.Option(min=1, help="Tokens of the verify step, for the first number of requests."),
    ] = 1024,
    repeats: Annotated[int, typer.Option(min=2, help="Repetitions of each.")] = 300,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Measure what selecting the nodes to verify costs, in processor time of the scheduler's thread."""
    from benchmarks import selection_cost, tables

    try:
        record = selection_cost.run(policy or [], requests or [256, 64], candidates, budget, repeats, seed)
    except ValueError as error:
        raise failed("selection", error) from None
    tables.write_json(json_file, record)
