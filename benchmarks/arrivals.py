"""When requests arrive: Poisson, gamma and constant processes, and recorded traces."""

from __future__ import annotations

import csv
import gzip
import io
import json
from enum import StrEnum
from pathlib import Path

import numpy as np


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
    text = read_text(path)
    if ".jsonl" in path.suffixes:
        seconds = np.array([json.loads(line)["timestamp"] for line in text.splitlines() if line]) / 1000.0
    else:
        rows = csv.DictReader(io.StringIO(text))
        column = next((name for name in rows.fieldnames or () if name.lower() == "timestamp"), None)
        if column is None:
            raise ValueError(f"{path}: no column TIMESTAMP among {rows.fieldnames}")
        stamps = [row[column] for row in rows]
        try:
            seconds = np.array([float(stamp) for stamp in stamps])
        except ValueError:
            # Azure writes seven decimals, which datetime.fromisoformat refuses and numpy takes. A zone
            # (the 2024 traces have one) is the same in every row, and only differences matter.
            moments = np.array([stamp.partition("+")[0].rstrip("Z") for stamp in stamps], "datetime64[ns]")
            seconds = (moments - moments[0]).astype(np.int64) / 1e9
    if len(seconds) == 0:
        raise ValueError(f"{path}: no arrivals")
    seconds = np.sort(seconds)
    times: list[float] = (seconds - seconds[0]).tolist()
    return times


def rescale(times: list[float], rate: float | None) -> list[float]:
    """The same arrivals stretched to a mean of `rate` requests per second (unchanged for None)."""
    if rate is None or len(times) < 2 or times[-1] <= 0:
        return times
    factor = (len(times) - 1) / rate / times[-1]
    return [time * factor for time in times]
