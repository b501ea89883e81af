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


def counter(name: str, text: str, *labels: str, unit: str = "") -> Metric:
    """A number that only grows."""
    return Metric(name, "counter", text, labels, unit=unit)


def gauge(name: str, text: str, *labels: str, unit: str = "") -> Metric:
    """A number that is what it is now."""
    return Metric(name, "gauge", text, labels, unit=unit)


def histogram(
    name: str, text: str, buckets: tuple[float, ...], *labels: str, unit: str = "seconds"
) -> Metric:
    """How often a number was at most each of `buckets`."""
    return Metric(name, "histogram", text, labels, buckets, unit)
