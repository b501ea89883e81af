"""What is asked of a simulated cell: lengths, objectives and arrival times; prompts need no text here."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.arrivals import category_peaks, read_text, renewal_times, rescale, row_times, what_is_wrong
from benchmarks.objectives import NO_SLO_SPEC, Limit, Slo, SloSpec
from benchmarks.prompts import adaserve_category
from cluster.stream_messages import NOBODY, Objective, Tenant, Terms
from simulator.noise import key_of

# How many gaps before its window a renewal process begins, and by how many standard deviations of their
# number more gaps are drawn than are expected.
_LEAD_GAPS, _MOST_DEVIATIONS = 8.0, 6.0


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request.

    Attributes:
        request_id: unique in the run.
        kind: its class.
        arrival_s: when it arrives, from the start.
        num_prompt, num_output: tokens, both at least 1.
        max_tokens: bound on its answer, which is all that the scheduler knows; None to tell it `num_output`.
        objective: in milliseconds.
        seed: of its text and of what drafters say of it.
        priority: smaller is served earlier.
        on_miss, downgrades: what is done if it is predicted to miss its objective, as in `Submit`.
        tenant: whose it is, where API keys compete.
    """

    request_id: str
    kind: str
    arrival_s: float
    num_prompt: int
    num_output: int
    objective: Objective
    seed: int
    priority: int = 0
    on_miss: str = "serve"
    downgrades: tuple[Terms, ...] = ()
    tenant: Tenant = NOBODY
    max_tokens: int | None = None

    @property
    def ends_early(self) -> bool:
        """Whether its answer ends with an end token, and not because of its bound."""
        return self.max_tokens is not None and self.num_output < self.max_tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths and objective of a request before it has an arrival time."""

    kind: str
    num_prompt: int
    num_output: int
    slo: SloSpec = NO_SLO_SPEC
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of the built-in mix: lengths are log-normal, given by median and sigma of the logarithm.

    Attributes:
        share: of requests.
        prompt, output: median, sigma, and the least and most tokens.
        slo: objective.
    """

    share: float
    prompt: tuple[float, float, int, int]
    output: tuple[float, float, int, int]
    slo: SloSpec


# AdaServe's mix (EuroSys 2026, table 2). Medians and spreads of prompts are those of its workload files
# (HumanEval, Alpaca, CNN/DailyMail); its answers have 256 tokens each, and here vary around that.
MIX: Mapping[str, Kind] = {
    "code": Kind(
        0.6, (120.0, 0.45, 16, 1024), (220.0, 0.4, 16, 1024), SloSpec(tpot=Limit(1.2, relative=True))
    ),
    "chat": Kind(0.2, (16.0, 0.5, 4, 2048), (220.0, 0.7, 8, 1024), SloSpec(tpot=Limit(50.0))),
    "summary": Kind(0.2, (700.0, 0.5, 64, 4096), (200.0, 0.4, 16, 1024), SloSpec(tpot=Limit(150.0))),
}


def synthetic(
    count: int, seed: int, shares: Mapping[str, float] | None = None, fixed_output: int | None = None
) -> list[Shape]:
    """Requests of the built-in mix.

    Args:
        count: how many.
        seed: of classes and lengths.
        shares: by class; None takes the mix's own.
        fixed_output: tokens of every answer, instead of the mix's lengths.

    Raises:
        ValueError: for a class that is not in the mix.
    """
    shares = shares or {name: kind.share for name, kind in MIX.items()}
    unknown = sorted(shares.keys() - MIX.keys())
    if unknown:
        raise ValueError(f"no class {', '.join(unknown)} in the built-in mix: {', '.join(MIX)}")
    rng = np.random.default_rng((seed, 2))
    names = list(shares)
    weights = np.array([shares[name] for name in names])
    drawn = rng.choice(len(names), size=count, p=weights / weights.sum())
    shapes = []
    for index in drawn.tolist():
        kind = MIX[names[index]]
        output = fixed_output or _length(kind.output, rng)
        shapes.append(Shape(names[index], _length(kind.prompt, rng), output, kind.slo))
    return shapes


def of_lengths(
    count: int, seed: int, lengths: Mapping[str, tuple[int, int]], shares: Mapping[str, float] | None = None
) -> list[Shape]:
    """Requests without objectives; lengths vary log-normally (sigma 0.4).

    Args:
        count: how many.
        seed: of lengths and classes.
        lengths: medians of prompt and answer tokens, by class.
        shares: by class, which is then drawn; None takes classes in turns.

    Raises:
        ValueError: for a class that has a share and no lengths.
    """
    rng, kinds = np.random.default_rng((seed, 3)), list(lengths)
    if shares is not None:
        unknown = sorted(shares.keys() - lengths.keys())
        if unknown:
            raise ValueError(f"how long {', '.join(unknown)} is was not said, only {', '.join(lengths)}")
        weights = np.array(list(shares.values()))
        kinds = rng.choice(list(shares), size=count, p=weights / weights.sum()).tolist()
    shapes = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        medians = lengths[kind]
        prompt, output = (_length((float(median), 0.4, 4, 1 << 16), rng) for median in medians)
        shapes.append(Shape(kind, prompt, output))
    return shapes


def parse_lengths(text: str) -> dict[str, tuple[int, int]]:
    """Medians of prompt and answer tokens by class.

    >>> parse_lengths("code=110:55,chat=60:31")
    {'code': (110, 55), 'chat': (60, 31)}

    Raises:
        ValueError: for a part that is not CLASS=PROMPT:ANSWER.
    """
    lengths = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\w+)=(\d{1,6}):(\d{1,6})\s*", part)
        if found is None or not int(found[2]) or not int(found[3]):
            raise ValueError(f"--lengths {text}: {part.strip()!r} is not CLASS=PROMPT:ANSWER, in tokens")
        lengths[found[1]] = (int(found[2]), int(found[3]))
    return lengths


def check_classes(slos: Mapping[str, SloSpec], kinds: Iterable[str]) -> None:
    """See that objectives are for classes that exist: one of a name mistyped would silently count for nobody.

    Raises:
        ValueError: for another class than `kinds` and `*`.
    """
    held = sorted(set(kinds))
    unknown = sorted(slos.keys() - {*held, "*"})
    if unknown:
        raise ValueError(f"--slo: no class {', '.join(unknown)} among {', '.join(held)} (`*` is all others)")


def adaserve_file(path: Path) -> list[Shape]:
    """A workload file of AdaServe's artifact, with its own arrival times.

    Raises:
        ValueError: if it is none.
    """
    shapes: list[Shape] = []
    try:
        for row in json.loads(read_text(path)):
            shapes.append(_adaserve_request(row))
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        where = f"entry {len(shapes) + 1}: {what_is_wrong(error)}"
        raise ValueError(f"{path} is no AdaServe workload: {where}") from None
    if not shapes:
        raise ValueError(f"{path}: no requests")
    return shapes


def _adaserve_request(row: Mapping[str, float]) -> Shape:
    kind, limit = adaserve_category(float(row["slo_ratio"]))
    at_s, prompt, output = float(row["emission_time_ms"]) / 1e3, row["input_length"], row["output_length"]
    if not 0.0 <= at_s < math.inf:
        raise ValueError(f"emission_time_ms is {row['emission_time_ms']}")
    if min(prompt, output) < 0:
        raise ValueError(f"a length is {min(prompt, output)}")
    return Shape(kind, max(1, int(prompt)), max(1, int(output)), SloSpec(tpot=limit), arrival_s=at_s)


def trace_file(path: Path, slo: SloSpec = NO_SLO_SPEC, most_tokens: int = 1 << 17) -> list[Shape]:
    """An Azure (CSV) or Mooncake (JSON lines) trace, with its own arrival times and lengths.

    Args:
        path: the file, may be gzipped.
        slo: of every request.
        most_tokens: longer requests are left out.

    Raises:
        ValueError: if it is none, saying what is wrong with it.
    """
    times = row_times(path)
    text = read_text(path)
    kind = path.name.split(".")[0]
    names = ("ContextTokens", "GeneratedTokens")
    rows: Iterable[Mapping[str, str]] = csv.DictReader(io.StringIO(text))
    if ".jsonl" in path.suffixes:
        names = ("input_length", "output_length")
        rows = (json.loads(line) for line in text.splitlines() if line)
    lengths = []
    for number, row in enumerate(rows, start=1):
        try:
            prompt, output = int(row[names[0]]), int(row[names[1]])
            if prompt < 0 or output < 0:
                raise ValueError(f"{min(prompt, output)} is below 0")
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            wrong = what_is_wrong(error)
            raise ValueError(f"{path}: row {number}: no lengths {' and '.join(names)}: {wrong}") from None
        lengths.append((prompt, output))
    shapes = [
        Shape(kind, max(1, prompt), max(1, output), slo, at)
        for at, (prompt, output) in zip(times.tolist(), lengths, strict=True)
        if prompt + output <= most_tokens
    ]
    if not shapes:
        raise ValueError(f"{path}: every request has more than {most_tokens:,} tokens")
    return sorted(shapes, key=lambda shape: shape.arrival_s or 0.0)


def servegen(
    rates: Path, lengths: Path, duration_s: float, rate: float, seed: int, *, start_s: float = 0.0
) -> list[Shape]:
    """Requests of a production service from ServeGen's statistics of its clients.

    In every window of its own a client's arrivals are a renewal process with gamma gaps of the recorded
    variation; lengths come from the client's tables. All rates are scaled so that the mean is `rate`.

    Args:
        rates: the combined table of client rates (CSV, may be gzipped).
        lengths: the clients' tables of lengths (JSON lines, may be gzipped).
        duration_s: seconds to make.
        rate: mean requests per second.
        seed: of arrivals and lengths.
        start_s: where in the recorded days to begin.
    """
    rng = np.random.default_rng((seed, 3))
    tables = _length_tables(lengths)
    windows = []
    for row in csv.DictReader(io.StringIO(read_text(rates))):
        at = float(row["window_start_s"]) - start_s
        if row["client"] in tables and -600.0 < at < duration_s and float(row["rate_req_per_s"]) > 0.0:
            windows.append((row["client"], at, float(row["rate_req_per_s"]), float(row["cv"] or 1.0)))
    if not windows:
        raise ValueError(f"{rates}: no client is active from {start_s:g} s for {duration_s:g} s")
    overlap = [min(at + 600.0, duration_s) - max(at, 0.0) for _, at, _, _ in windows]
    total = sum(span * one[2] for span, one in zip(overlap, windows, strict=True))
    factor = rate * duration_s / total
    shapes = []
    for client, at, of_client, cv in windows:
        mean = of_client * factor
        cv = max(cv, 0.1)
        # Begun before the window, which then lies anywhere in the process. Begun with it, a client that sends
        # less than once in a window would hardly be seen, and one that sends in bursts would begin with one.
        lead = _LEAD_GAPS * (1.0 + cv * cv)
        expected = lead + 600.0 * mean
        count = math.ceil(expected + _MOST_DEVIATIONS * cv * math.sqrt(expected))
        gaps = rng.gamma(cv**-2.0, cv * cv / mean, count)
        times = at - lead / mean + np.cumsum(gaps)
        times = times[(times >= max(at, 0.0)) & (times < min(at + 600.0, duration_s))]
        table = tables[client]
        window = max((w for w in table if w <= at + start_s), default=min(table))
        prompts, outputs = table[window]
        for time in times.tolist():
            prompt = int(rng.choice(prompts[0], p=prompts[1]))
            output = int(rng.choice(outputs[0], p=outputs[1]))
            shapes.append(Shape("servegen", max(1, prompt), max(1, output), arrival_s=time))
    shapes.sort(key=lambda shape: shape.arrival_s or 0.0)
    return shapes


def arrive(
    shapes: Sequence[Shape],
    baseline_s: float,
    *,
    rate: float | None = None,
    burstiness: float = 1.0,
    peaks: bool = False,
    own_times: bool = False,
    slos: Mapping[str, SloSpec] | None = None,
    seed: int = 0,
) -> list[SimRequest]:
    """Give requests their arrival times and absolute objectives.

    Args:
        shapes: the requests.
        baseline_s: seconds per token that relative objectives are multiples of.
        rate: requests per second; None leaves a trace's own rate.
        burstiness: gamma shape of the gaps (1 is Poisson), as in `benchmarks.arrivals.renewal_times`.
        peaks: classes peak one after the other (AdaServe figures 13 and 14).
        own_times: keep the trace's arrivals, stretched to `rate` if that is given.
        slos: objectives by class instead of the requests' own; `*` is for classes not named.
        seed: of arrivals, texts and drafts.
    """
    count, rng = len(shapes), np.random.default_rng((seed, 1))
    if own_times:
        if any(shape.arrival_s is None for shape in shapes):
            raise ValueError("these requests carry no arrival times; give a rate")
        times = rescale([shape.arrival_s or 0.0 for shape in shapes], rate)
    elif rate is None:
        raise ValueError("a rate is needed: these requests are not to keep arrival times of their own")
    elif peaks:
        times = category_peaks([shape.kind for shape in shapes], count / rate, rng)
    else:
        times = renewal_times(count, rate, burstiness, rng)
    baseline = Slo(tpot_ms=1e3 * baseline_s)
    requests = []
    for index, (shape, time) in enumerate(zip(shapes, times, strict=True)):
        spec = (slos or {}).get(shape.kind, (slos or {}).get("*", shape.slo))
        slo = spec.resolve(baseline)
        requests.append(
            SimRequest(
                request_id=f"r{index}",
                kind=shape.kind,
                arrival_s=time,
                num_prompt=shape.num_prompt,
                num_output=shape.num_output,
                objective=Objective(tpot_ms=slo.tpot_ms, ttft_ms=slo.ttft_ms, e2e_ms=slo.e2e_ms),
                seed=key_of(seed, index) >> 1,
            )
        )
    return sorted(requests, key=lambda request: request.arrival_s)


def cut(shapes: Sequence[Shape], start_s: float, duration_s: float) -> list[Shape]:
    """The requests of a trace that arrive in an interval, counted from its beginning."""
    return [
        replace(shape, arrival_s=shape.arrival_s - start_s)
        for shape in shapes
        if shape.arrival_s is not None and start_s <= shape.arrival_s < start_s + duration_s
    ]


def _length(shape: tuple[float, float, int, int], rng: np.random.Generator) -> int:
    median, sigma, least, most = shape
    return int(min(max(round(median * float(np.exp(sigma * rng.standard_normal()))), least), most))


Lengths = tuple[NDArray[np.int64], NDArray[np.float64]]


def _length_tables(path: Path) -> dict[str, dict[float, tuple[Lengths, Lengths]]]:
    """By client and window start, lengths and probabilities of prompts and answers."""
    tables: dict[str, dict[float, tuple[Lengths, Lengths]]] = {}
    for line in read_text(path).splitlines():
        row = json.loads(line)
        windows = {
            float(window): (_distribution(held["input_tokens"]), _distribution(held["output_tokens"]))
            for window, held in row["dataset"].items()
            if held["input_tokens"] != "{}" and held["output_tokens"] != "{}"
        }
        if windows:
            tables[str(row["client"])] = windows
    return tables


def _distribution(text: str) -> Lengths:
    """A "{length: probability}" table."""
    pairs = [part.split(":") for part in text.strip().strip("{}").split(",") if part.strip()]
    lengths = np.array([int(float(length.strip().strip("'\""))) for length, _ in pairs])
    chances = np.array([float(chance) for _, chance in pairs])
    return lengths, chances / chances.sum()
