"""PromQL over metrics of the catalog; what it does not have cannot be asked for."""

from __future__ import annotations

from cluster.metric import Kind
from cluster.metric_catalog import CATALOG

#: Selects what the dashboard's variables say: processes scraped as one job, its cells, their tiers.
JOB = 'job=~"$job"'
CELLS = f'{JOB}, cell=~"$cell"'
TIERS = f'{CELLS}, tier=~"$tier"'
#: Of recorded series and those of front ends, which know no cells.
OF_ALL_CELLS = f'{JOB}, tier=~"$tier"'

_WINDOW = "$__rate_interval"


def gauge(name: str, labels: str = CELLS, more: str = "") -> str:
    """A gauge with these labels."""
    return f"{_declared(name, 'gauge')}{{{_joined(labels, more)}}}"


def summed(name: str, by: str = "", labels: str = CELLS, more: str = "") -> str:
    """Sum of a gauge."""
    return f"sum{_by(by)} ({gauge(name, labels, more)})"


def rate(name: str, by: str = "", labels: str = CELLS, more: str = "") -> str:
    """A counter's growth per second."""
    return f"sum{_by(by)} (rate({_declared(name, 'counter')}{{{_joined(labels, more)}}}[{_WINDOW}]))"


def over_range(name: str, by: str = "", labels: str = CELLS, more: str = "") -> str:
    """A counter's growth over all that the dashboard shows."""
    return f"sum{_by(by)} (increase({_declared(name, 'counter')}{{{_joined(labels, more)}}}[$__range]))"


def quantile(share: float, name: str, by: str = "", labels: str = CELLS, more: str = "") -> str:
    """A quantile of a histogram."""
    return f"histogram_quantile({share:g}, {buckets(name, by, labels, more)})"


def buckets(name: str, by: str = "", labels: str = CELLS, more: str = "") -> str:
    """A histogram's buckets, per second."""
    keys = f"le, {by}" if by else "le"
    metric = f"{_declared(name, 'histogram')}_bucket"
    return f"sum by ({keys}) (rate({metric}{{{_joined(labels, more)}}}[{_WINDOW}]))"


def mean(name: str, by: str = "", labels: str = CELLS, more: str = "") -> str:
    """Mean of what a histogram observed."""
    metric, chosen = _declared(name, "histogram"), _joined(labels, more)
    total, count = (
        f"sum{_by(by)} (rate({metric}_{part}{{{chosen}}}[{_WINDOW}]))" for part in ("sum", "count")
    )
    return f"{total} / {count}"


def quantiles(name: str, shares: tuple[float, ...] = (0.5, 0.95, 0.99), **more: str) -> list[tuple[str, str]]:
    """Several quantiles of a histogram, with legends."""
    suffix = f" {{{{{more['by']}}}}}" if more.get("by") else ""
    return [(quantile(share, name, **more), f"p{share * 100:g}{suffix}") for share in shares]


def _joined(labels: str, more: str) -> str:
    return ", ".join(filter(None, (labels, more)))


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


def _declared(name: str, kind: Kind) -> str:
    metric = CATALOG.get(name)
    if metric is None or metric.kind != kind:
        what = "not there" if metric is None else f"a {metric.kind}"
        raise ValueError(f"`{name}` is no {kind}: in cluster/metric_catalog.py it is {what}")
    return name
