"""When requests arrive: Poisson, gamma and constant processes, and recorded traces."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import numpy as np

# How much higher than between its peaks a class's rate is at its peak, and how long a peak lasts (as standard
# deviation, in shares of the run).
PEAK_HEIGHT, PEAK_WIDTH = 8.0, 0.08


class Arrivals(StrEnum):
    """Arrival process; `closed` sends the next request when one finishes."""

    closed = "closed"
    poisson = "poisson"
    gamma = "gamma"
    constant = "constant"
    trace = "trace"
    workload = "workload"


def read_text(path: Path) -> str:
    """A text file, unpacked when it ends in `.gz`."""
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def gaps_to_times(gaps: np.ndarray) -> list[float]:
    """Arrival times from gaps; the first request arrives at once."""
    return [0.0, *np.cumsum(gaps).tolist()]


def renewal_times(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Arrivals with independent gamma gaps of mean `1/rate`.

    `burstiness` is the gamma shape, as in `vllm bench serve`: 1 is Poisson, below 1 burstier (the
    coefficient of variation is `burstiness ** -0.5`), infinity a constant gap.
    """
    if count == 0:
        return []
    if not rate > 0:
        raise ValueError(f"the request rate must be positive, not {rate}")
    if not burstiness > 0:
        raise ValueError(f"burstiness must be positive, not {burstiness}")
    if np.isinf(burstiness):
        return gaps_to_times(np.full(count - 1, 1.0 / rate))
    return gaps_to_times(rng.gamma(burstiness, 1.0 / (rate * burstiness), count - 1))


def trace_times(path: Path) -> list[float]:
    """Arrival times in seconds from the first of a trace, sorted.

    Reads the Azure LLM traces (CSV with `TIMESTAMP`) and Mooncake's (JSON lines with `timestamp` in
    milliseconds), both also gzipped.
    """
    times: list[float] = np.sort(row_times(path)).tolist()
    return times


def row_times(path: Path) -> np.ndarray:
    """As `trace_times`, float64 [rows] in the order of the file."""
    text = read_text(path)
    if ".jsonl" in path.suffixes:
        try:
            stamps = [float(json.loads(line)["timestamp"]) for line in text.splitlines() if line]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: a line has no `timestamp` in milliseconds: {error}") from None
        seconds = np.array(stamps) / 1000.0
    else:
        rows = csv.DictReader(io.StringIO(text))
        column = next((name for name in rows.fieldnames or () if name.lower() == "timestamp"), None)
        if column is None:
            raise ValueError(f"{path}: no column TIMESTAMP among {rows.fieldnames}")
        texts = [row[column] for row in rows]
        try:
            seconds = np.array([float(stamp) for stamp in texts])
        except ValueError:
            # Azure writes seven decimals, which datetime.fromisoformat refuses and numpy takes. A zone
            # (the 2024 traces have one) is the same in every row, and only differences matter.
            moments = np.array([stamp.partition("+")[0].rstrip("Z") for stamp in texts], "datetime64[ns]")
            seconds = (moments - moments[0]).astype(np.int64) / 1e9
    if len(seconds) == 0:
        raise ValueError(f"{path}: no arrivals")
    since_first: np.ndarray = seconds - seconds.min()
    return since_first


def rescale(times: list[float], rate: float | None) -> list[float]:
    """The same arrivals stretched to a mean of `rate` requests per second (unchanged for None)."""
    if rate is None or len(times) < 2:
        return times
    # A part of a workload need not begin at once, and files need not be in the order of time.
    span = max(times) - min(times)
    if span <= 0:
        return times
    factor = (len(times) - 1) / rate / span
    return [time * factor for time in times]


def category_peaks(domains: Sequence[str], duration_s: float, rng: np.random.Generator) -> list[float]:
    """Arrival times of requests whose classes peak one after the other (AdaServe figures 13, 14).

    A class's arrivals are a Poisson process, given how many there are, whose rate rises to `PEAK_HEIGHT`
    times its base in a bell around the class's own moment: of k classes, the i-th peaks at (i + 1/2) / k.

    Args:
        domains: class of each request.
        duration_s: seconds from the first possible arrival to the last.
        rng: source of randomness.

    Returns:
        the time of each request in seconds, in the order of `domains`.
    """
    names = sorted(set(domains))
    grid = np.linspace(0.0, 1.0, 2001)
    times = np.empty(len(domains))
    for index, name in enumerate(names):
        centre = (index + 0.5) / len(names)
        rate = 1.0 + (PEAK_HEIGHT - 1.0) * np.exp(-0.5 * ((grid - centre) / PEAK_WIDTH) ** 2)
        share = np.concatenate([[0.0], np.cumsum((rate[1:] + rate[:-1]) / 2)])
        mine = np.flatnonzero([domain == name for domain in domains])
        times[mine] = np.interp(rng.random(len(mine)), share / share[-1], grid) * duration_s
    arrivals: list[float] = times.tolist()
    return arrivals
