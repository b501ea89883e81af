"""What a dashboard shows, as data: rows of panels, panels of queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

Kind = Literal["timeseries", "stat", "heatmap"]
#: From which value on a colour holds; the first starts anywhere.
Thresholds = tuple[tuple[float | None, str], ...]

PLAIN: Thresholds = ((None, "green"),)
#: Grafana divides a row into so many columns.
COLUMNS = 24


def above(warning: float, critical: float) -> Thresholds:
    """Green up to `warning`, red from `critical` on."""
    return ((None, "green"), (warning, "orange"), (critical, "red"))


def below(warning: float, critical: float) -> Thresholds:
    """Red below `critical`, green from `warning` on."""
    return ((None, "red"), (critical, "orange"), (warning, "green"))


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression, and what its series are called."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        title: unique in its dashboard.
        description: what is shown, and what it means if it looks otherwise than usual.
        unit: Grafana's id of the unit.
        queries: drawn together.
        kind: how they are drawn.
        width: in columns, of 24.
        height: in Grafana's rows.
        thresholds: colours; drawn as lines too where a time series has more than one.
        maximum: of the axis; None leaves it to the data.
        is_stacked: whether series add up.
        dashed: legends (as regular expression) of limits among the series.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    thresholds: Thresholds = PLAIN
    maximum: float | None = None
    is_stacked: bool = False
    dashed: str = ""


class Look(TypedDict, total=False):
    """What a panel may be given beside its contents, as in `Panel`."""

    width: int
    height: int
    thresholds: Thresholds
    maximum: float | None
    is_stacked: bool
    dashed: str


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard.

    Attributes:
        uid: by which others link to it; the name of its file.
        title: shown.
        description: the question that it answers.
        rows: from top to bottom.
    """

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, in order."""
        return tuple(panel for row in self.rows for panel in row.panels)


def series(title: str, description: str, unit: str, *queries: tuple[str, str], **look: Unpack[Look]) -> Panel:
    """A panel with lines over time; queries are pairs of expression and legend."""
    return Panel(title, description, unit, tuple(Query(*query) for query in queries), **look)


def stat(title: str, description: str, unit: str, query: tuple[str, str], **look: Unpack[Look]) -> Panel:
    """A panel with the newest value as a number."""
    shape: Look = {"width": 4, "height": 5, **look}
    return Panel(title, description, unit, (Query(*query),), kind="stat", **shape)


def heatmap(title: str, description: str, unit: str, expr: str, **look: Unpack[Look]) -> Panel:
    """A panel with a histogram over time."""
    return Panel(title, description, unit, (Query(expr, "{{le}}"),), kind="heatmap", **look)
