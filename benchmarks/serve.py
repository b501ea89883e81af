"""`flotilla bench serve`: load on a running server, judged by its objectives."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.progress import Progress, TaskID

from benchmarks import environment, prompts, tables, workload
from benchmarks.arrivals import Arrivals
from benchmarks.load_client import LoadClient, Outcome, run_load
from benchmarks.objectives import Slo, SloSpec
from benchmarks.report import outcome_json, report

# Decodes without drafts: what relative objectives are multiples of.
SPECULATION_OFF = {"speculation": {"mode": "off"}}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `flotilla bench serve` was asked to do; see its help for the meaning of each."""

    url: str
    model: str | None = None
    source: str = "zoo"
    mix: str | None = None
    num_requests: int | None = None
    max_tokens: int | None = None
    arrivals: Arrivals | None = None
    request_rate: float | None = None
    burstiness: float = 1.0
    trace: Path | None = None
    max_concurrency: int | None = None
    slos: Mapping[str, SloSpec] | None = None
    send_slo: bool = True
    sampling: Mapping[str, Any] | None = None
    extra_body: Mapping[str, Any] | None = None
    baseline_requests: int = 4
    num_warmups: int = 2
    seed: int = 0
    api_key: str | None = None
    timeout_s: float = 300.0
    details: bool = False


def choose_arrivals(options: ServeOptions, has_times: bool) -> Arrivals:
    """The arrival process asked for, or the one the other options imply."""
    if options.arrivals is not None:
        return options.arrivals
    if options.trace is not None:
        return Arrivals.trace
    # A bound on concurrency alone asks for a closed loop, whatever the file says.
    if has_times and options.max_concurrency is None and options.mix is None:
        return Arrivals.workload
    if options.request_rate is not None:
        return Arrivals.poisson if options.burstiness == 1.0 else Arrivals.gamma
    return Arrivals.closed


def unused(options: ServeOptions, arrivals: Arrivals) -> list[str]:
    """The options given that say nothing to an arrival process."""
    given = {
        "--request-rate": options.request_rate is not None and arrivals is Arrivals.closed,
        "--burstiness": options.burstiness != 1.0 and arrivals is not Arrivals.gamma,
        "--trace": options.trace is not None and arrivals is not Arrivals.trace,
        # A workload is sent as it is.
        "--mix": options.mix is not None and arrivals is Arrivals.workload,
    }
    return [name for name, is_unused in given.items() if is_unused]


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked.

    Attributes:
        requests: those that are measured.
        beforehand: what may be asked before them: first prompts that they do not ask, so that theirs are in
            no prefix cache when they come, then their own.
        arrivals: their arrival process.
        concurrency: how many at once, at most.
    """

    requests: list[workload.BenchRequest]
    beforehand: list[workload.BenchRequest]
    arrivals: Arrivals
    concurrency: int | None


def build_load(options: ServeOptions) -> Load:
    """The workload, its arrival process and the bound on concurrency.

    Raises:
        ValueError: for options that do not go together, or a file that cannot be read.
        OSError: likewise.
    """
    loaded = prompts.load(options.source)
    arrivals = choose_arrivals(options, all(prompt.arrival_s is not None for prompt in loaded))
    if idle := unused(options, arrivals):
        raise ValueError(
            f"{', '.join(idle)}: of no use with `{arrivals}` arrivals; leave out, or choose other --arrivals"
        )
    requests = workload.build(
        loaded,
        count=options.num_requests,
        shares=workload.parse_mix(options.mix) if options.mix else None,
        arrivals=arrivals,
        rate=options.request_rate,
        burstiness=options.burstiness,
        trace=options.trace,
        slos=options.slos,
        max_tokens=options.max_tokens,
        seed=options.seed,
    )
    concurrency = options.max_concurrency
    if concurrency is None and arrivals is Arrivals.closed:
        concurrency = 8
    spare = workload.not_asked(loaded, requests, options.max_tokens)
    return Load(requests, [*spare, *requests], arrivals, concurrency)


def by_domain(
    requests: Sequence[workload.BenchRequest], each: int, skip: int = 0
) -> list[workload.BenchRequest]:
    """The first `each` requests of every class after `skip` others, if it has more, without arrival times."""
    held = Counter(request.domain for request in requests)
    seen: Counter[str] = Counter()
    chosen = []
    for request in requests:
        first = skip if held[request.domain] > skip else 0
        if first <= seen[request.domain] < first + each:
            chosen.append(replace(request, arrival_s=None))
        seen[request.domain] += 1
    return chosen


def in_turns(requests: Sequence[workload.BenchRequest], count: int) -> list[workload.BenchRequest]:
    """The first `count` requests, the classes in turn, without arrival times."""
    seen: Counter[str] = Counter()
    places = []
    for request in requests:
        places.append(seen[request.domain])
        seen[request.domain] += 1
    order = sorted(range(len(requests)), key=lambda index: places[index])
    return [replace(requests[index], arrival_s=None) for index in order[:count]]


def baseline_latency(outcomes: Sequence[Outcome]) -> dict[str, Slo]:
    """Median latencies by class; the time per output token is one figure for all classes.

    A decode step at concurrency 1 costs the same whatever the text, so pooling only removes noise;
    time to first token depends on prompt lengths and stays apart.
    """
    done = [outcome for outcome in outcomes if outcome.is_ok]
    if not done:
        raise RuntimeError(f"the baseline measurement failed: {outcomes[0].error}")
    tpots = [outcome.tpot_ms for outcome in done if outcome.tpot_ms is not None]
    tpot = statistics.median(tpots) if tpots else None
    baselines = {}
    for domain in sorted({outcome.request.domain for outcome in outcomes}):
        own = [outcome for outcome in done if outcome.request.domain == domain]
        ttfts = [outcome.ttft_ms for outcome in own if outcome.ttft_ms is not None]
        ends = [outcome.e2e_ms for outcome in own if outcome.e2e_ms is not None]
        baselines[domain] = Slo(
            ttft_ms=statistics.median(ttfts) if ttfts else None,
            tpot_ms=tpot,
            e2e_ms=statistics.median(ends) if ends else None,
        )
    return baselines


def describe_objectives(requests: Sequence[workload.BenchRequest]) -> dict[str, str]:
    """What each class asks for, in words short enough for a table."""
    words: dict[str, set[str]] = {}
    for request in requests:
        parts = []
        for metric in ("ttft", "tpot", "e2e"):
            limit, value = getattr(request.spec, metric), getattr(request.slo, f"{metric}_ms")
            if limit is not None and value is not None:
                factor = f" ({limit.value:g}x)" if limit.relative else ""
                parts.append(f"{metric.upper() if metric != 'e2e' else metric} {value:.1f} ms{factor}")
        words.setdefault(request.domain, set()).add(", ".join(parts) or "none")
    return {domain: next(iter(texts)) if len(texts) == 1 else "several" for domain, texts in words.items()}


async def find_model(client: LoadClient, wanted: str | None) -> str:
    """The model asked for, else the server's first."""
    if wanted is not None:
        return wanted
    return str((await client.models())[0]["id"])


def _ticker(bar: Progress, task: TaskID) -> Any:
    def advance(outcome: Outcome) -> None:
        bar.advance(task)

    return advance


async def run(options: ServeOptions) -> dict[str, Any]:
    """Run the benchmark, print its tables and return its JSON record."""
    load = build_load(options)
    requests, arrivals, concurrency = load.requests, load.arrivals, load.concurrency
    extra = dict(options.extra_body or {})
    needs_baseline = any(request.spec.needs_baseline for request in requests)
    client = LoadClient(
        options.url,
        options.model or "",
        sampling=options.sampling,
        send_slo=options.send_slo,
        api_key=options.api_key,
        timeout_s=options.timeout_s,
    )
    async with client:
        client.model = await find_model(client, options.model)
        with tables.progress() as bar:
            warmups = in_turns(load.beforehand, options.num_warmups)
            task = bar.add_task("Warming up", total=len(warmups))
            warm = await run_load(client, warmups, max_concurrency=1, extra=extra, on_done=_ticker(bar, task))
            if warmups and not any(outcome.is_ok for outcome in warm.outcomes):
                raise RuntimeError(f"the first requests to {options.url} failed: {warm.outcomes[0].error}")
            baselines: dict[str, Slo] = {}
            if needs_baseline:
                # Not those of the warm-up, whose prompts the server need not read any more.
                warmed = Counter(request.domain for request in warmups)
                most = max(warmed.values(), default=0)
                sample = by_domain(load.beforehand, options.baseline_requests, skip=most)
                task = bar.add_task("Baseline without speculation, concurrency 1", total=len(sample))
                base = await run_load(
                    client,
                    sample,
                    max_concurrency=1,
                    extra={**extra, **SPECULATION_OFF},
                    on_done=_ticker(bar, task),
                )
                baselines = baseline_latency(base.outcomes)
            requests = workload.with_slos(requests, baselines)
            task = bar.add_task(f"Load ({arrivals})", total=len(requests))
            result = await run_load(
                client, requests, max_concurrency=concurrency, extra=extra, on_done=_ticker(bar, task)
            )
    run_report = report(result)
    objectives = describe_objectives(requests)
    tables.console.print(
        f"{len(requests)} requests to {client.model} at {options.url}, arrivals {arrivals}"
        + (
            f" at {options.request_rate:g}/s"
            if options.request_rate and arrivals is not Arrivals.closed
            else ""
        )
        + (f", at most {concurrency} at once" if concurrency else ""),
        markup=False,
    )
    if baselines:
        tpot = next(iter(baselines.values())).tpot_ms
        tables.console.print(f"Baseline time per output token: {tables.number(tpot, 2)} ms")
    tables.print_run(run_report, objectives)
    record: dict[str, Any] = {
        "benchmark": "serve",
        "environment": environment.describe(),
        "options": asdict(options) | {"api_key": None},
        "model": client.model,
        "arrivals": str(arrivals),
        "max_concurrency": concurrency,
        "baseline": {domain: asdict(slo) for domain, slo in baselines.items()},
        "objectives": objectives,
        "report": run_report.to_json(),
    }
    if options.details:
        record["requests"] = [outcome_json(outcome) for outcome in result.outcomes]
    return record
