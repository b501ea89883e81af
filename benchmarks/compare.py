"""`flotilla bench compare`: speculation policies side by side, on one workload and one warm cell."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks import compare_calibration as calibration
from benchmarks import compare_outputs, compare_summary, demo, environment, tables, workload
from benchmarks import prompts as prompt_sources
from benchmarks.code_version import version_of
from benchmarks.compare_cell import WarmCell
from benchmarks.compare_plan import (
    DEFAULT_RATES,
    PLAIN,
    Rate,
    Run,
    parse_entrant,
    parse_rate,
    points_of,
    schedule,
)
from benchmarks.compare_progress import CompareProgress
from benchmarks.compare_record import Record, run_record
from benchmarks.compare_workload import (
    DEFAULT_MIX,
    DEFAULT_SLOS,
    Texts,
    Traffic,
    has_objectives,
    own_shares,
    requests_for,
    those_that_fit,
    warmup_requests,
)
from benchmarks.objectives import Slo, SloSpec, parse_slos
from benchmarks.prompts import Prompt
from benchmarks.serve import describe_objectives
from benchmarks.weight_files import fingerprints
from cluster.config import FlotillaConfig

# Of runs whose requests bring no arrivals.
DEFAULT_DURATION_S = 20.0
# Where the load is not what is swept.
FIXED_RATE = "0.7x"
# Requests at once while warming up.
WARMUP_CONCURRENCY = 4
# Added to a run's arrivals to estimate how long it takes.
DRAIN_S = 3.0
# Options that say what to run, or where to put it, and not how: they may differ when a file is continued.
EXTENSIBLE = (
    "policies",
    "rates",
    "urgent_shares",
    "slo_scales",
    "seeds",
    "timeout_s",
    "json_file",
    "plots",
)


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What `flotilla bench compare` was asked to do; see its help for the meaning of each."""

    policies: tuple[str, ...]
    config: Path | None = None
    source: str = "zoo"
    rates: tuple[Rate, ...] = ()
    urgent_shares: tuple[float, ...] = ()
    slo_scales: tuple[float, ...] = ()
    mix: str | None = None
    slos: tuple[str, ...] = ()
    urgent: str | None = None
    peaks: bool = False
    seeds: tuple[int, ...] = (0, 1, 2)
    start_s: float = 0.0
    duration_s: float | None = None
    num_requests: int | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    warmups: int = 8
    baseline_requests: int = 6
    timeout_s: float = 300.0
    json_file: Path | None = None
    plots: Path | None = None


def default_objectives(domains: Sequence[str]) -> Mapping[str, SloSpec]:
    """AdaServe's, of those of its classes that there are.

    Raises:
        ValueError: if there are others.
    """
    found = {}
    for name, slo in parse_slos(DEFAULT_SLOS).items():
        with contextlib.suppress(ValueError):  # a class that these prompts lack
            found[workload.match_domain(name, domains)] = slo
    missing = sorted(set(domains) - found.keys())
    if missing:
        raise ValueError(f"the prompts bring no objectives for {', '.join(missing)}; --slo names some")
    return found


def traffic_of(options: CompareOptions, prompts: Sequence[Prompt]) -> Traffic:
    """What the requests are made from, with AdaServe's mix and objectives where nothing else is said."""
    domains = list(own_shares(prompts))

    def named(name: str) -> str:
        return name if name == "*" else workload.match_domain(name, domains)

    mix = options.mix or (DEFAULT_MIX if options.source == "zoo" else None)
    shares = None
    if mix is not None:
        shares = {named(name): share for name, share in workload.parse_mix(mix).items()}
    slos: Mapping[str, SloSpec] = parse_slos(options.slos)
    if not slos and not has_objectives(prompts):
        slos = default_objectives(domains)
    urgent = named(options.urgent or ("code" if "code" in domains else next(iter(shares or domains))))
    if shares is not None and urgent not in shares:
        raise ValueError(f"the urgent class `{urgent}` has no share in the mix {mix}")
    if min(options.urgent_shares, default=1.0) < 1.0 and set(shares or domains) == {urgent}:
        raise ValueError(f"the urgent class `{urgent}` is the only one: no other can have the rest")
    traffic = Traffic(
        prompts=prompts,
        shares=shares,
        slos={named(name): slo for name, slo in slos.items()},
        urgent=urgent,
        start_s=options.start_s,
        duration_s=options.duration_s,
        num_requests=options.num_requests,
        max_tokens=options.max_tokens,
        peaks=options.peaks,
    )
    if options.duration_s is None and (not traffic.has_arrivals or options.urgent_shares):
        return replace(traffic, duration_s=DEFAULT_DURATION_S)
    return traffic


def rates_of(options: CompareOptions, traffic: Traffic) -> tuple[Rate, ...]:
    """The rates asked for; else none where requests bring their arrivals, one where something else is swept,
    and from idle to saturation otherwise."""
    if options.rates or (traffic.has_arrivals and not options.urgent_shares):
        return options.rates
    something_else = options.urgent_shares or options.slo_scales or options.peaks
    return tuple(map(parse_rate, (FIXED_RATE,) if something_else else DEFAULT_RATES))


def cell_config(path: Path | None) -> FlotillaConfig:
    """The cell of the comparison: nothing of a request is found in another, since all policies are sent the
    same prompts, and whoever comes first would read them for the others."""
    return demo.keeping_nothing(demo.load_config(path))


class Comparison:
    """A comparison on its way: what is to be measured, and the record of what has been."""

    def __init__(self, options: CompareOptions) -> None:
        self.options = options
        self.config = cell_config(options.config)
        self.entrants = {text: parse_entrant(text, self.config) for text in dict.fromkeys(options.policies)}
        self._directory = demo.directory(self.config.target.path)
        self._texts = Texts(self._directory)
        loaded = [self._texts.encode(prompt) for prompt in prompt_sources.load(options.source)]
        self.traffic = traffic_of(options, loaded)
        self.rates = rates_of(options, self.traffic)
        points = points_of(self.rates, options.urgent_shares, options.slo_scales)
        self.points = {point.key: point for point in points}
        settings = {name: value for name, value in asdict(options).items() if name not in EXTENSIBLE}
        settings["cell"] = self.config.model_dump(mode="json")
        settings["code version"] = version_of(__name__)
        # Paths do not tell what is in files.
        settings["weights"] = fingerprints(self.config)
        settings["prompts"] = hashlib.sha256(repr(loaded).encode()).hexdigest()[:12]
        self.record = Record.resume(options.json_file, settings, environment.describe())
        runs = schedule(list(self.entrants), list(self.points), options.seeds)
        self.pending = [run for run in runs if not self.record.has(run)]
        self._num_done = len(runs) - len(self.pending)

    def measure(self) -> None:
        """Take all runs that are missing, then account for outputs that differ."""
        if self.pending:
            self._take_pending()
        self._explain_differences()

    def _take_pending(self) -> None:
        with tables.console.status("Starting the cell..."):
            cell = WarmCell(
                self.config,
                self._texts.end_tokens,
                temperature=self.options.temperature,
                timeout_s=self.options.timeout_s,
            )
        try:
            self._leave_out_what_is_too_long(cell.describe()["max_tokens"])
            if self._num_done:
                tables.console.print(
                    f"{self._num_done:,} runs are in {self.options.json_file} and not taken again. Those "
                    "added now do not take turns with them: in between the machine may have changed its pace."
                )
            with CompareProgress() as bar:
                self._calibrate(cell, bar)
                bar.start([self._expected_s(run) for run in self.pending], self._num_done)
                for run in self.pending:
                    self._take(cell, run, bar)
        finally:
            cell.close()

    def requests(self, run: Run) -> list[workload.BenchRequest]:
        """The requests of a run."""
        baselines = {domain: Slo(**values) for domain, values in self.record.baseline.items()}
        point = self.points[run.point]
        return requests_for(self.traffic, point, self._requests_per_s(run), run.seed, baselines)

    def _requests_per_s(self, run: Run) -> float | None:
        rate = self.points[run.point].rate
        return None if rate is None else rate.resolve(self.record.saturation)

    def _expected_s(self, run: Run) -> float:
        return max(request.arrival_s or 0.0 for request in self.requests(run)) + DRAIN_S

    def _leave_out_what_is_too_long(self, max_tokens: int) -> None:
        held = self.traffic.prompts
        kept = those_that_fit(held, max_tokens)
        if len(kept) < len(held):
            tables.console.print(
                f"[yellow]{len(held) - len(kept)} of {len(held)} prompts do not fit the target's context of "
                f"{max_tokens} tokens and are left out.[/yellow]"
            )
        if not kept:
            raise ValueError("no prompt fits the target's context")
        self.traffic = replace(self.traffic, prompts=kept)

    def _calibrate(self, cell: WarmCell, bar: CompareProgress) -> None:
        """Measure what objectives and rates are relative to, unless the record has it."""
        needs_rate = any(rate.relative for rate in self.rates) and self.record.saturation is None
        if self.record.baseline and not needs_rate:
            return
        cell.set_policy(parse_entrant(PLAIN, self.config))
        if not self.record.baseline:
            sample = calibration.baseline_requests(self.traffic, self.options.baseline_requests)
            with bar.phase("Baseline latency without load", len(sample)) as advance:
                baseline = calibration.measure_baseline(cell, sample, advance)
            self.record.baseline = {domain: asdict(slo) for domain, slo in baseline.items()}
        if needs_rate:
            concurrency = self.config.scheduler.max_running
            requests = calibration.saturation_requests(self.traffic, concurrency)
            with bar.phase(f"Saturation throughput, {concurrency} at once", len(requests)) as advance:
                saturation = calibration.measure_saturation(cell, requests, concurrency, advance)
            self.record.saturation = saturation
        self.record.save()

    def _take(self, cell: WarmCell, run: Run, bar: CompareProgress) -> None:
        requests = self.requests(run)
        cell.set_policy(self.entrants[run.policy])
        with bar.run(f"{run.policy} at {run.point}, seed {run.seed}", len(requests)) as advance:
            warmups = warmup_requests(self.traffic, self.options.warmups, run.seed)
            cell.load(warmups, max_concurrency=WARMUP_CONCURRENCY)
            before = cell.totals()
            result = cell.load(requests, on_done=advance)
        differing = compare_outputs.check(self.record.outputs, result.outcomes)
        held = run_record(run, result, before, cell.totals(), compare_outputs.unexplained(differing))
        self.record.points[run.point] = asdict(self.points[run.point]) | {
            "requests_per_s": self._requests_per_s(run),
            "objectives": describe_objectives(requests),
        }
        self.record.runs.append(held)
        self.record.save()

    def _explain_differences(self) -> None:
        """Also of runs that were taken earlier, before the command was interrupted."""
        record = self.record
        for held in record.runs:
            differing = compare_outputs.unseen(held["differences"], record.outputs)
            if not differing:
                continue
            with tables.console.status("Recomputing the target's scores where outputs differ..."):
                held["differences"] = compare_outputs.explain_all(
                    differing,
                    self._directory,
                    self.options.temperature,
                    self._texts.end_tokens,
                    self.config.target.quantization,
                    self.config.target.dtype,
                )
            record.save()


def run(options: CompareOptions) -> Record:
    """Take what is missing of the comparison, print its tables, write its files; returns the record.

    Raises:
        ValueError: for options that do not go together, before anything is started.
    """
    comparison = Comparison(options)
    comparison.measure()
    record = comparison.record
    labels = list(comparison.entrants)
    ours = [label for label, entrant in comparison.entrants.items() if entrant.is_ours]
    summary = compare_summary.summarise(record, labels, list(comparison.points), ours)
    compare_summary.show(record, summary)
    record.summary = compare_summary.to_json(summary)
    record.save()
    if options.json_file is not None:
        tables.console.print(f"Wrote {options.json_file}.")
    if options.plots is not None:
        from benchmarks import plots

        for path in plots.draw(record, summary, options.plots):
            tables.console.print(f"Wrote {path}.")
    return record
