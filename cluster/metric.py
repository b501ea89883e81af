"""What a metric is: its name, its kind, and what is said about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Process = Literal["cell", "front_end", "gathered"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: as exposed; a histogram's without `_bucket`, `_sum`, `_count`.
        kind: of metric.
        help: what it is, for people.
        labels: their names, besides `cell` or `front_end`, which every process adds to all of its own.
        buckets: upper bounds, of a histogram.
        unit: of the value; empty for plain counts.
        group: heading under which it is documented.
        processes: who exposes it; `gathered` is the front end that answers a scrape of the whole system.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    unit: str = ""
    group: str = ""
    processes: tuple[Process, ...] = ("cell",)
