"""When requests arrive: Poisson, gamma and constant processes, and recorded traces."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
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
    """A text file, unpacked when it ends in `.gz`, without the mark that spreadsheets begin theirs with.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is cut off, or no text.
    """
    data = path.read_bytes()
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (EOFError, UnicodeDecodeError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be unpacked or is no text: {error}") from None


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
    """As `trace_times`, float64 [rows] in the order of the file.

    Raises:
        ValueError: if the file is no such trace, saying what is wrong with it.
    """
    text = read_text(path)
    try:
        seconds = _line_times(text) if ".jsonl" in path.suffixes else _column_times(text)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {what_is_wrong(error)}") from None
    if len(seconds) == 0:
        raise ValueError(f"{path}: no arrivals")
    if not np.isfinite(seconds).all():
        raise ValueError(f"{path}: row {int(np.flatnonzero(~np.isfinite(seconds))[0]) + 1} has no time")
    since_first: np.ndarray = seconds - seconds.min()
    return since_first


def what_is_wrong(error: Exception) -> str:
    """What is wrong with a row; a `KeyError` by itself says only which name it misses."""
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def _line_times(text: str) -> np.ndarray:
    """Seconds of JSON lines with a `timestamp` in milliseconds."""
    stamps = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line:
            try:
                stamps.append(float(json.loads(line)["timestamp"]))
            except (KeyError, TypeError, ValueError) as error:
                wrong = what_is_wrong(error)
                raise ValueError(f"line {number} has no `timestamp` in milliseconds: {wrong}") from None
    return np.array(stamps) / 1000.0


def _column_times(text: str) -> np.ndarray:
    """Seconds of a CSV file, from any moment on."""
    rows = csv.DictReader(io.StringIO(text))
    column = next((name for name in rows.fieldnames or () if name.lower() == "timestamp"), None)
    if rows.fieldnames is None:
        raise ValueError("the file is empty")
    if column is None:
        raise ValueError(f"no column TIMESTAMP among {', '.join(rows.fieldnames)}")
    stamps = [row[column] or "" for row in rows]
    try:
        return np.array([float(stamp) for stamp in stamps])
    except ValueError:
        # Azure writes seven decimals, which datetime.fromisoformat refuses and numpy takes. A zone
        # (the 2024 traces have one) is the same in every row, and only differences matter.
        moments = np.array([_moment(row, stamp) for row, stamp in enumerate(stamps, start=1)])
        since_one: np.ndarray = (moments - moments[0]) / np.timedelta64(1, "s")
        return since_one


def _moment(row: int, stamp: str) -> np.datetime64:
    try:
        return np.datetime64(stamp.partition("+")[0].rstrip("Z"), "ns")
    except ValueError:
        raise ValueError(f"TIMESTAMP of row {row} is no time: {stamp!r}") from None


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
