"""Metric objects of one process, made from the catalog and from nothing else."""

from __future__ import annotations

import importlib
import platform
import threading
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from cluster.metric import Process
from cluster.metric_catalog import CATALOG, exposed_by

Made = TypeVar("Made", Counter, Gauge, Histogram)
Labels = tuple[str, ...]

psutil: Any = importlib.import_module("psutil")

_MAKERS = {"counter": Counter, "gauge": Gauge}


class UndeclaredMetric(LookupError):
    """The metric is not in the catalog, or not as what it was asked for."""


class MetricSet:
    """All metrics that one kind of process exposes.

    Label values are given in the order in which the catalog names the labels.

    Args:
        process: which kind.
        constant: labels added to every sample, such as `cell`; may be changed later.

    Attributes:
        registry: what is exposed, constant labels included.
    """

    def __init__(self, process: Process, constant: Mapping[str, str] | None = None) -> None:
        self.constant = dict(constant or {})
        self.registry = CollectorRegistry(auto_describe=False)
        self._process = process
        self._own = CollectorRegistry(auto_describe=False)
        self._made: dict[str, Counter | Gauge | Histogram] = {}
        self._shown: dict[str, set[Labels]] = {}
        self._growing = threading.Lock()
        self._seen: WeakKeyDictionary[object, dict[tuple[str, Labels], float]] = WeakKeyDictionary()
        for metric in exposed_by(process):
            if metric.kind == "histogram":
                self._made[metric.name] = Histogram(
                    metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=self._own
                )
            else:
                make = _MAKERS[metric.kind]
                self._made[metric.name] = make(metric.name, metric.help, metric.labels, registry=self._own)
        self.registry.register(_Labelled(self._own, self.constant))
        if "flotilla_build_info" in self._made:
            self.gauge("flotilla_build_info", flotilla_version(), platform.python_version()).set(1)
            self.gauge("flotilla_process_start_time_seconds").set(psutil.Process().create_time())

    def counter(self, name: str, *labels: str) -> Counter:
        """The counter with these label values; raises `UndeclaredMetric`, and ValueError for wrong labels."""
        return self._find(Counter, name, labels)

    def gauge(self, name: str, *labels: str) -> Gauge:
        """The gauge with these label values; raises as `counter`."""
        return self._find(Gauge, name, labels)

    def histogram(self, name: str, *labels: str) -> Histogram:
        """The histogram with these label values; raises as `counter`."""
        return self._find(Histogram, name, labels)

    def show(self, name: str, values: Iterable[tuple[Labels, float]]) -> None:
        """Set a gauge for these label values, and forget all others: what it is about comes and goes.

        A scrape in another thread meanwhile misses none of those that stay.

        Raises:
            UndeclaredMetric, ValueError: as `counter`.
        """
        shown = set()
        for labels, value in values:
            self.gauge(name, *labels).set(value)
            shown.add(labels)
        for labels in self._shown.get(name, set()) - shown:
            self._made[name].remove(*labels)
        self._shown[name] = shown

    def grow(self, source: object, name: str, total: float, *labels: str) -> None:
        """Bring a counter up to date with a total that `source` keeps; several sources add up."""
        with self._growing:  # several scrapes at once, each in a thread of its own
            seen = self._seen.setdefault(source, {})
            grown = total - seen.get((name, labels), 0.0)
            if grown > 0.0:
                seen[name, labels] = total
        self.counter(name, *labels).inc(max(0.0, grown))

    def measure_process(self) -> None:
        """Bring the metrics of the process itself up to date."""
        process = psutil.Process()
        with process.oneshot():
            used = process.cpu_times()
            self.gauge("flotilla_process_resident_memory_bytes").set(process.memory_info().rss)
        self.grow(self, "flotilla_process_cpu_seconds_total", used.user + used.system)

    def render(self) -> str:
        """The exposition text as it stands."""
        return generate_latest(self.registry).decode()

    def _find(self, kind: type[Made], name: str, labels: Labels) -> Made:
        found = self._made.get(name)
        if not isinstance(found, kind):
            declared = f"a {CATALOG[name].kind}" if name in CATALOG else "not there"
            raise UndeclaredMetric(
                f"`{name}` is no {kind.__name__.lower()} of a {self._process}: in cluster/metric_catalog.py "
                f"it is {declared}"
            )
        return found.labels(*labels) if labels or CATALOG[name].labels else found


class _Labelled(Collector):
    """A registry's metrics with constant labels, without the times at which they were made."""

    def __init__(self, registry: CollectorRegistry, constant: Mapping[str, str]) -> None:
        self._registry = registry
        self._constant = constant

    def collect(self) -> Iterable[Family]:
        """See `Collector`."""
        for family in self._registry.collect():
            family.samples = [
                sample._replace(labels={**sample.labels, **self._constant})
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]
            yield family


def merge(texts: Iterable[str]) -> str:
    """Expositions of several processes as one: every metric described once, with the samples of all."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for text in texts:
        name = ""
        for line in text.split("\n"):
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                is_new = name not in families
                headers, samples = families.setdefault(name, ([], []))
                if is_new:
                    headers.append(line)
            elif line.startswith("# TYPE "):
                if is_new:
                    headers.append(line)
            elif line and name and not line.startswith("#"):
                samples.append(line)
    lines = [line for headers, samples in families.values() for line in (*headers, *samples)]
    return "".join(f"{line}\n" for line in lines)


def flotilla_version() -> str:
    """The installed version, or that of a checkout."""
    try:
        return version("flotilla")
    except PackageNotFoundError:
        return "0+checkout"
