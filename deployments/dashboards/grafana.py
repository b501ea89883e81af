"""Dashboards as Grafana reads them, by Grafana's own types (grafana-foundation-sdk, of the `dev` extra)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeAlias

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as models
from grafana_foundation_sdk.models import dashboard as dashboards
from grafana_foundation_sdk.models import heatmap as heatmaps
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deployments.dashboards.capacity import CAPACITY
from deployments.dashboards.members import CLUSTER
from deployments.dashboards.overview import overview
from deployments.dashboards.spec import COLUMNS, Board, Panel
from deployments.dashboards.speculation import SPECULATION
from deployments.dashboards.steps import STEPS
from deployments.dashboards.tiers import tier_board

TAG = "flotilla"
_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

#: Variables by name: label, and the series whose label they list. Each narrows those after it.
VARIABLES = {
    "job": ("Job", "label_values(flotilla_build_info, job)"),
    "model": ("Model", 'label_values(flotilla_config_info{job=~"$job"}, model)'),
    "cell": ("Cell", 'label_values(flotilla_config_info{job=~"$job", model=~"$model"}, cell)'),
    "tier": ("Tier", 'label_values(flotilla_requests_running{job=~"$job", cell=~"$cell"}, tier)'),
}

_Builder: TypeAlias = timeseries.Panel | stat.Panel | heatmap.Panel
_Maker: TypeAlias = Callable[[Panel], _Builder]


def boards(target: float) -> tuple[Board, ...]:
    """All dashboards, for a share of requests that are to attain their objectives."""
    return (overview(target), tier_board(target), SPECULATION, STEPS, CAPACITY, CLUSTER)


def dashboard_files(target: float) -> dict[str, str]:
    """Contents by file name; see `boards`."""
    return {f"{board.uid}.json": to_json(board) for board in boards(target)}


def to_json(board: Board) -> str:
    """The dashboard, ready to be imported."""
    text = json.dumps(_dashboard(board).build(), cls=JSONEncoder, indent=2, sort_keys=True)
    return text + "\n"


def _dashboard(board: Board) -> dashboard.Dashboard:
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([TAG])
        .editable()
        .tooltip(dashboards.DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-3h", "now")
        .timezone("browser")
        .with_variable(_datasource())
        .link(_links())
        .annotation(_alert_annotation())
    )
    for name in VARIABLES:
        made = made.with_variable(_variable(name))
    identity, y = 0, 0
    for row in board.rows:
        identity += 1
        place = dashboards.GridPos(h=1, w=COLUMNS, x=0, y=y)
        made = made.with_row(dashboard.Row(row.title).id(identity).grid_pos(place))
        y += 1
        x = height = 0
        for panel in row.panels:
            identity += 1
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            place = dashboards.GridPos(h=panel.height, w=panel.width, x=x, y=y)
            made = made.with_panel(_panel(panel).id(identity).grid_pos(place))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return made


def _panel(panel: Panel) -> _Builder:
    makers: dict[str, _Maker] = {"timeseries": _timeseries, "stat": _stat, "heatmap": _heatmap}
    made = makers[panel.kind](panel)
    made = made.title(panel.title).description(panel.description).unit(panel.unit).datasource(_SOURCE)
    made = made.thresholds(_thresholds(panel)).min(0)
    if panel.maximum is not None:
        made = made.max(panel.maximum)
    for index, query in enumerate(panel.queries):
        target = (
            prometheus.Dataquery()
            .expr(query.expr)
            .legend_format(query.legend)
            .ref_id(chr(ord("A") + index))
            .datasource(_SOURCE)
        )
        target = target.instant() if panel.kind == "stat" else target.range()
        if panel.kind == "heatmap":
            target = target.format(PromQueryFormat.HEATMAP)
        made = made.with_target(target)
    return made


def _timeseries(panel: Panel) -> timeseries.Panel:
    calcs = ["lastNotNull", "max"]
    legend = (
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(models.LegendDisplayMode.TABLE)
        .placement(models.LegendPlacement.BOTTOM)
        .calcs(calcs)
    )
    tooltip = (
        common.VizTooltipOptions().mode(models.TooltipDisplayMode.MULTI).sort(models.SortOrder.DESCENDING)
    )
    made = (
        timeseries.Panel()
        .legend(legend)
        .tooltip(tooltip)
        .line_width(1)
        .fill_opacity(40 if panel.is_stacked else 8)
        .show_points(models.VisibilityMode.NEVER)
    )
    if panel.is_stacked:
        made = made.stacking(common.StackingConfig().mode(models.StackingMode.NORMAL))
    if len(panel.thresholds) > 1:
        style = common.GraphThresholdsStyleConfig().mode(models.GraphThresholdsStyleMode.DASHED)
        made = made.thresholds_style(style)
    if panel.dashed:
        dash = {"fill": "dash", "dash": [10, 10]}
        properties = [
            dashboards.DynamicConfigValue(id_val="custom.lineStyle", value=dash),
            dashboards.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
        ]
        made = made.override_by_regexp(f"/^{panel.dashed}$/", properties)
    return made


def _stat(panel: Panel) -> stat.Panel:
    return (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .color_mode(models.BigValueColorMode.BACKGROUND)
        .graph_mode(models.BigValueGraphMode.NONE)
        .text_mode(models.BigValueTextMode.AUTO)
    )


def _heatmap(panel: Panel) -> heatmap.Panel:
    return (
        heatmap.Panel()
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit(panel.unit))
        .color(
            heatmap.HeatmapColorOptions().mode(heatmaps.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
        )
        .show_legend()
    )


def _thresholds(panel: Panel) -> dashboard.ThresholdsConfig:
    steps = [dashboards.Threshold(value=value, color=color) for value, color in panel.thresholds]
    return dashboard.ThresholdsConfig().mode(dashboards.ThresholdsMode.ABSOLUTE).steps(steps)


def _datasource() -> dashboard.DatasourceVariable:
    return dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")


def _variable(name: str) -> dashboard.QueryVariable:
    label, query = VARIABLES[name]
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(_SOURCE)
        .query({"query": query, "refId": name})
        .definition(query)
        .multi(True)
        .include_all(True)
        .current(dashboards.VariableOption(text=["All"], value=["$__all"]))
        .refresh(dashboards.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboards.VariableSort.ALPHABETICAL_ASC)
    )


def _links() -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink("Flotilla")
        .type(dashboards.DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .include_vars(True)
        .keep_time(True)
    )


def _alert_annotation() -> dashboard.AnnotationQuery:
    expr = 'ALERTS{alertname=~"Flotilla.*", alertstate="firing", severity="page", job=~"$job|"}'
    return (
        dashboard.AnnotationQuery()
        .name("Pages")
        .datasource(_SOURCE)
        .enable(True)
        .icon_color("red")
        .expr(expr)
        .title_format("{{alertname}}")
        .text_format("{{tier}}")
    )
