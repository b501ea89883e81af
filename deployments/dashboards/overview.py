"""The dashboard to open first: is something wrong, how fast is the error budget spent, and on what."""

from __future__ import annotations

from deployments.dashboards import recording as rec
from deployments.dashboards.promql import (
    CELLS,
    JOB,
    OF_ALL_CELLS,
    TIERS,
    gauge,
    over_range,
    quantiles,
    rate,
    summed,
)
from deployments.dashboards.spec import Board, Row, above, below, series, stat


def _recorded(name: str) -> str:
    return f"{name}{{{OF_ALL_CELLS}}}"


def _firing(severity: str) -> str:
    # With the page that knows no job: that nothing is scraped at all.
    chosen = f'alertname=~"Flotilla.*", alertstate="firing", severity="{severity}", job=~"$job|"'
    return f"count(ALERTS{{{chosen}}}) or vector(0)"


_SLO = "flotilla_slo_requests_total"
_MISSED = over_range(_SLO, "tier", TIERS, 'objective="all", attained="false"')
_JUDGED = over_range(_SLO, "tier", TIERS, 'objective="all"')
_BUDGET = f"1 - ({_MISSED} / ({_JUDGED} > 0)) / on (tier) (1 - max by (tier) ({_recorded(rec.TARGET)}))"
# Of front ends: what a cell that is full or drains refuses, another takes.
_REJECTED = "flotilla_front_end_requests_rejected_total"
_REFUSED = rate(_REJECTED, "", OF_ALL_CELLS)
_ADMITTED = rate("flotilla_admission_decisions_total", "", OF_ALL_CELLS, 'decision!="rejected"')

_BUDGET_ROW = Row(
    "Error budget",
    (
        series(
            "Attainment by tier",
            "Share of requests that attained all their objectives, over 5 minutes, and the target. A tier "
            "without such requests has no line.",
            "percentunit",
            (_recorded(rec.attainment("5m")), "{{tier}}"),
            (_recorded(rec.TARGET), "target {{tier}}"),
            width=12,
            maximum=1,
            dashed="target.*",
        ),
        series(
            "Burn rate",
            "Missed objectives over those that may be missed. Above both lines' windows (14.4 over 1 h and 5 "
            "min) it pages. Where 5 min is back below, the incident is over and the rest is its echo.",
            "none",
            (_recorded(rec.burn("5m")), "{{tier}} 5m"),
            (_recorded(rec.burn("1h")), "{{tier}} 1h"),
            width=12,
            thresholds=above(1, rec.FASTEST),
        ),
        series(
            "Slow burn",
            "The same over longer windows: above 6 over 6 h it pages, above 3 over a day or 1 over three "
            "days there is a ticket.",
            "none",
            (_recorded(rec.burn("6h")), "{{tier}} 6h"),
            (_recorded(rec.burn("1d")), "{{tier}} 1d"),
            (_recorded(rec.burn("3d")), "{{tier}} 3d"),
            width=12,
            thresholds=above(1, 6),
        ),
        stat(
            "Budget left over the time shown",
            "1 with no objective missed, 0 where as many were missed as the target allows, below if more.",
            "percentunit",
            (_BUDGET, "{{tier}}"),
            width=12,
            height=8,
            thresholds=below(0.5, 0.0),
        ),
    ),
)

_LOAD = Row(
    "What clients see",
    (
        series(
            "Requests ended",
            "By their ends. `error` is this system's fault, `invalid` the client's; `cancelled` its wish.",
            "reqps",
            (rate("flotilla_requests_total", "finish_reason", TIERS), "{{finish_reason}}"),
            is_stacked=True,
        ),
        series(
            "Time to first token",
            "From arrival at the cell. Grows first with the queue, then with prompts.",
            "s",
            *quantiles("flotilla_time_to_first_token_seconds", labels=TIERS),
        ),
        series(
            "Time per output token",
            "Of whole requests, after the first token.",
            "s",
            *quantiles("flotilla_time_per_output_token_seconds", labels=TIERS),
        ),
        series(
            "Running and waiting",
            "Requests admitted, and requests queued for a place.",
            "none",
            (summed("flotilla_requests_running", labels=TIERS), "running"),
            (summed("flotilla_requests_waiting", labels=TIERS), "waiting"),
        ),
        series(
            "Output tokens and goodput",
            "All tokens as they are committed; goodput: those of requests that attained their objectives, "
            "counted when a request ends.",
            "suffix: tokens/s",
            (rate("flotilla_generation_tokens_total", "", CELLS), "all"),
            (rate("flotilla_goodput_tokens_total", "", TIERS), "goodput"),
        ),
        series(
            "HTTP errors",
            "Answers with 4xx (the client's mistake, or a refusal) and 5xx (ours).",
            "reqps",
            (
                rate("flotilla_http_requests_total", "", JOB, 'status=~"4.."') + " or vector(0)",
                "4xx",
            ),
            (
                rate("flotilla_http_requests_total", "", JOB, 'status=~"5.."') + " or vector(0)",
                "5xx",
            ),
        ),
    ),
)

_CAUSES = Row(
    "Where to look next",
    (
        series(
            "Missed objectives by cause",
            "queue: Capacity; prefill, verify: Steps; draft: Drafters; preempt: KV pool, in Capacity.",
            "reqps",
            (rate("flotilla_slo_violations_total", "cause", TIERS), "{{cause}}"),
            is_stacked=True,
        ),
        series(
            "Refusals by reason",
            "What no cell took. queue_full: more comes than is served; saturated: admission predicts a miss; "
            "slo_infeasible: asked for more than an idle cell can do.",
            "reqps",
            (rate(_REJECTED, "code", OF_ALL_CELLS), "{{code}}"),
            is_stacked=True,
        ),
        series(
            "KV pool in use",
            "Full pools make requests wait and preempt others.",
            "percentunit",
            (gauge("flotilla_kv_cache_usage_ratio"), "{{cell}}"),
            maximum=1,
            thresholds=above(0.85, 0.95),
        ),
    ),
)


def _now(target: float) -> Row:
    return Row(
        "Now",
        (
            stat(
                "Pages firing",
                "Alerts that wake somebody. Each names its runbook in docs/runbooks.",
                "none",
                (_firing("page"), "pages"),
                thresholds=((None, "green"), (1, "red")),
            ),
            stat(
                "Tickets firing",
                "Alerts that can wait for the morning.",
                "none",
                (_firing("ticket"), "tickets"),
                thresholds=((None, "green"), (1, "orange")),
            ),
            stat(
                "Cells ready",
                "Cells whose target serves. None: every request waits or is refused.",
                "none",
                (f"sum({rec.CELLS_READY}{{{JOB}}})", "cells"),
                thresholds=((None, "red"), (1, "green")),
            ),
            stat(
                "Lowest attainment",
                "Of the tier that attains its objectives least, over 5 minutes.",
                "percentunit",
                (f"min({_recorded(rec.attainment('5m'))})", "lowest"),
                thresholds=below(target, round(2 * target - 1, 6)),
            ),
            stat(
                "Fastest burn",
                "Of the tier that spends its error budget fastest, over an hour; 1 lasts a month. Pages from "
                "14.4.",
                "none",
                (f"max({_recorded(rec.burn('1h'))})", "fastest"),
                thresholds=above(1, rec.FASTEST),
            ),
            stat(
                "Refused",
                "Share of requests that no cell took, for whatever reason; of all cells.",
                "percentunit",
                (f"{_REFUSED} / ({_REFUSED} + {_ADMITTED} > 0)", "refused"),
                thresholds=above(0.01, 0.05),
            ),
        ),
    )


def overview(target: float) -> Board:
    """The dashboard; `target` is the share of requests that are to attain their objectives."""
    return Board(
        "flotilla-overview",
        "Flotilla: overview",
        "Is something wrong, how fast is the error budget spent, and where to look next.",
        (_now(target), _BUDGET_ROW, _LOAD, _CAUSES),
    )
