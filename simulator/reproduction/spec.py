"""What a figure is, as data: series over an axis, what of them is shown, and what the paper claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from simulator.reproduction.setting import Setting

Value = float | str
# Metrics made from those of two series at one point.
SPEEDUP = "speedup"


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement about a figure's series.

    Attributes:
        text: the statement; paper: the number or words of the paper.
        kind: a check of `simulator.reproduction.claims.CHECKS`.
        metric: of which.
        series: about whom. against: compared with whom, where there is somebody.
        at: values of the axis; all if empty.
        limit: threshold; what it means is the check's.
        why: why the outcome differs from the paper's, as far as we know.
    """

    text: str
    paper: str
    kind: str
    metric: str
    series: tuple[str, ...]
    against: tuple[str, ...] = ()
    at: tuple[Value, ...] = ()
    limit: float = 0.0
    why: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether it is asked of this system or of its oracle, and no paper says it."""
        return self.paper == "ours" or any(text.startswith("bound") for text in (self.text, self.paper))


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure or table of a paper.

    Attributes:
        name: in the command; title: in the report.
        axis: name of the horizontal axis.
        points: by value on it, what it changes in the setting.
        series: by label, what it changes in the setting.
        base: the rest of the setting.
        metrics: what is shown, a panel each.
        claims: what the paper says, and what is asked of ours.
        reference: label of the series that `speedup` divides the latency of.
        quick_seconds: of arrivals in a quick run.
        also: metrics that only the tables show.
        note: how the setting differs from the paper's.
    """

    name: str
    title: str
    axis: str
    points: Mapping[Value, Mapping[str, Any]]
    series: Mapping[str, Mapping[str, Any]]
    base: Setting
    metrics: tuple[str, ...]
    claims: tuple[Claim, ...] = ()
    reference: str = ""
    quick_seconds: float = 60.0
    note: str = ""
    also: tuple[str, ...] = ()

    def setting(self, label: str, value: Value, seconds: float | None = None) -> Setting:
        """What one series is run on at one value of the axis.

        Args:
            label: the series.
            value: of the axis.
            seconds: of arrivals, instead of the figure's own.
        """
        changes = {**self.points[value], **self.series[label]}
        setting = msgspec.structs.replace(self.base, **changes)
        if seconds is not None and not setting.count:
            setting = msgspec.structs.replace(setting, seconds=min(seconds, setting.seconds))
        return setting
