"""Alerts: what is worth a page, what a ticket, and from which value on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from deployments.dashboards import recording as rec

Severity = Literal["page", "ticket"]

#: Of fewer requests than this, with objectives in the long window or predicted, no share is worth an alert.
LEAST_REQUESTS = 10
#: Fewer that failed or were refused in a quarter of an hour, or missed objectives in the long window, wake
#: nobody, whatever their share: with a strict target a single one may be many times what is allowed.
LEAST_FAILURES = 5
#: Fewer that front ends refused by themselves in a quarter of an hour are one client's mistake.
LEAST_REFUSED_AT_DOOR = 20
#: Fewer forwards in a quarter of an hour are those of a machine at rest, whose clocks and caches are cold.
LEAST_CALLS = 100
#: A model whose forwards take less of a cell's forwards' time misleads nobody, whatever was predicted.
LEAST_SHARE = 0.05
_FORWARD_SECONDS = "flotilla_cost_model_actual_seconds_total"


@dataclass(frozen=True, slots=True)
class Condition:
    """A value and the threshold that it crosses; `compared` such as "> 0.9"."""

    value: str
    compared: str

    @property
    def expr(self) -> str:
        """As PromQL."""
        return f"{self.value} {self.compared}"


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert.

    Attributes:
        name: as it is shown; its runbook is named likewise.
        severity: `page` wakes somebody, `ticket` waits for the morning.
        conditions: which hold together, the first of them being the value that is shown.
        on: labels by which further conditions are joined to the first.
        lasting: how long they must hold.
        summary: one line.
        description: with values.
        is_absence: the alert fires where the only condition's value has no series.
    """

    name: str
    severity: Severity
    conditions: tuple[Condition, ...]
    summary: str
    description: str
    on: tuple[str, ...] = ()
    lasting: str = ""
    is_absence: bool = False
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def expr(self) -> str:
        """As PromQL."""
        first, *others = self.conditions
        if self.is_absence:
            return f"absent({first.value})"
        joint = f"\nand on ({', '.join(self.on)}) "
        return first.expr + "".join(f"{joint}({other.expr})" for other in others)

    @property
    def runbook(self) -> str:
        """File name of its page in docs/runbooks."""
        return f"{self.name}.md"

    def as_yaml(self, runbooks: str) -> dict[str, object]:
        """As in a rule file; `runbooks` is where the pages are."""
        rule: dict[str, object] = {"alert": self.name, "expr": self.expr}
        if self.lasting:
            rule["for"] = self.lasting
        return {
            **rule,
            "labels": {"severity": self.severity, **self.labels},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{runbooks.rstrip('/')}/{self.runbook}",
            },
        }


def _burn(severity: Severity, factor: float, long: str, short: str, spent: str) -> Alert:
    return Alert(
        f"FlotillaErrorBudgetBurn{long}",
        severity,
        (
            Condition(rec.burn(long), f"> {factor:g}"),
            Condition(rec.burn(short), f"> {factor:g}"),
            Condition(rec.judged(long), f">= {LEAST_REQUESTS}"),
            Condition(f"{rec.judged(long)} * (1 - {rec.attainment(long)})", f">= {LEAST_FAILURES}"),
        ),
        summary="Tier {{ $labels.tier }} of {{ $labels.job }} misses its objectives too often.",
        description=f"Over the last {long}, requests of tier {{{{ $labels.tier }}}} missed their objectives "
        '{{ printf "%.1f" $value }} times as often as the target allows, and over the last '
        f"{short} too (limit {factor:g}). So fast, {spent}.",
        on=("job", "tier"),
        labels={"window": long},
    )


def _expiry(severity: Severity, days: int) -> Alert:
    # It is 0 without TLS, which is no time that has come.
    earliest = "min by (job) (flotilla_tls_certificate_expiry_timestamp_seconds)"
    return Alert(
        f"FlotillaCertificateExpires{days}d",
        severity,
        (Condition(f"{earliest} - time()", f"< {days * 86400}"), Condition(earliest, "> 0")),
        summary="The certificate of {{ $labels.job }} expires soon, or has expired.",
        description="Its front ends serve with a certificate of which {{ $value | humanizeDuration }} are "
        f"left (limit {days} days). Once it has expired, clients that check it do not connect.",
        on=("job",),
    )


# A cell that is made again is another one, by its id: what it was before cannot be asked of it. So cells are
# counted that were not there an hour ago and are not there now, but were in between, and those that have been
# there all along and never served. In a rollout the old ones were there, and the new ones are.
_SEEN = "max by (job, cell) (max_over_time(flotilla_ready[1h]))"
_THERE = "max by (job, cell) (flotilla_ready)"
_ENDED_EARLY = f"({_SEEN} unless max by (job, cell) (flotilla_ready offset 1h) unless {_THERE})"
_NEVER_READY = f"({_SEEN} < 1 and {_THERE})"


ALERTS: tuple[Alert, ...] = (
    _burn("page", 14.4, "1h", "5m", "2 % of a month's error budget go in an hour"),
    _burn("page", 6, "6h", "30m", "5 % of a month's error budget go in six hours"),
    _burn("ticket", 3, "1d", "2h", "10 % of a month's error budget go in a day"),
    _burn("ticket", 1, "3d", "6h", "the error budget is spent before the month is over"),
    Alert(
        "FlotillaNoCellReady",
        "page",
        # Not before the first was there, or an hour is over: an installation takes as long as its models take
        # to load. Then an outage is none that ends by itself because it has lasted for a day.
        (
            Condition(rec.CELLS_READY, "< 1"),
            Condition(
                f"count by (job) (max_over_time({rec.CELLS_READY}[1d]) > 0 or {rec.CELLS_READY} offset 1h)",
                "> 0",
            ),
        ),
        summary="No cell of {{ $labels.job }} serves.",
        description="{{ $value }} cells are ready: every request waits or is refused.",
        on=("job",),
        lasting="1m",
    ),
    Alert(
        "FlotillaRequestsFailing",
        "page",
        (
            Condition(rec.REQUESTS_FAILED, "> 0.05"),
            Condition(rec.NUM_REQUESTS_FAILED, f">= {LEAST_FAILURES}"),
        ),
        summary="Requests to {{ $labels.job }} fail (seen_by: {{ $labels.seen_by }}).",
        description="{{ $value | humanizePercentage }} of them ended with an error that is not their "
        "clients' fault over the last 5 minutes.",
        on=("job", "seen_by"),
        lasting="5m",
    ),
    Alert(
        "FlotillaCellDown",
        "ticket",
        (
            Condition("min by (job, cell) (flotilla_ready)", "< 1"),
            Condition("max by (job, cell) (max_over_time(flotilla_ready[1d]))", "> 0"),
        ),
        summary="Cell {{ $labels.cell }} of {{ $labels.job }} has lost its target.",
        description="The cell runs, but its target no longer serves (flotilla_ready is {{ $value }}).",
        on=("job", "cell"),
        lasting="3m",
    ),
    Alert(
        "FlotillaCellIncomplete",
        "ticket",
        # Together, since drafters have a label more than the target.
        (
            Condition(
                "sum by (job, cell) (flotilla_ready == bool 0 or flotilla_drafters_ready == bool 0)", "> 0"
            ),
        ),
        summary="Cell {{ $labels.cell }} of {{ $labels.job }} does not become complete.",
        description="Of its target and its kinds of drafters, {{ $value }} are not ready, for 30 minutes.",
        lasting="30m",
    ),
    Alert(
        "FlotillaCellsRestarting",
        "ticket",
        # Zero in good times rather than nothing, so that it can be looked at.
        (
            Condition(
                f"(count by (job) ({_ENDED_EARLY} or {_NEVER_READY}) or 0 * count by (job) (flotilla_ready))",
                "> 2",
            ),
        ),
        summary="Cells of {{ $labels.job }} keep ending.",
        description="Of the cells that began within the last hour, {{ $value }} have ended again or never "
        "served, and so it has been for more than an hour.",
        # Whoever ends early is counted for an hour after it began: a rollout that was taken back, or a peak
        # that came and went, is over by then.
        lasting="65m",
    ),
    Alert(
        "FlotillaNoDraftersReady",
        "ticket",
        (
            Condition("sum by (job, cell) (flotilla_drafters_ready)", "< 1"),
            Condition("max by (job, cell) (max_over_time(flotilla_drafters_ready[1d]))", "> 0"),
        ),
        summary="Cell {{ $labels.cell }} of {{ $labels.job }} has no drafter left.",
        description="{{ $value }} drafters are alive: requests are decoded without speculation.",
        on=("job", "cell"),
        lasting="2m",
    ),
    Alert(
        "FlotillaRestartsFlapping",
        "ticket",
        # Workers are called alike in all cells: a target of each made again once is none that keeps failing.
        # An increase is extrapolated to its window, so that three are somewhat more than three.
        (
            Condition(
                "sum by (job, cell, worker) (increase(flotilla_worker_restarts_total[15m]))",
                "> 3.5",
            ),
        ),
        summary="Worker {{ $labels.worker }} of {{ $labels.job }} keeps failing.",
        description='In cell {{ $labels.cell }} it was made again {{ printf "%.0f" $value }} times in 15 '
        "minutes.",
    ),
    Alert(
        "FlotillaWorkersStalling",
        "ticket",
        (Condition("sum by (job, cell, kind) (increase(flotilla_worker_stalls_total[15m]))", "> 2.5"),),
        summary="Workers of {{ $labels.job }} stop answering ({{ $labels.kind }}).",
        description='In cell {{ $labels.cell }}, {{ printf "%.0f" $value }} were replaced in 15 minutes.',
    ),
    Alert(
        "FlotillaQueueSaturated",
        "page",
        (
            Condition(rec.QUEUE_REFUSALS, "> 0.05"),
            Condition(
                "sum by (job, tier) "
                f"(increase(flotilla_front_end_requests_rejected_total{{{rec.OVERLOAD_CODES}}}[15m]))",
                f">= {LEAST_FAILURES}",
            ),
        ),
        summary="Tier {{ $labels.tier }} of {{ $labels.job }} is refused for overload.",
        description="{{ $value | humanizePercentage }} of its requests were refused with `queue_full` or "
        "`saturated`, by all cells, over the last 5 minutes.",
        on=("job", "tier"),
        lasting="5m",
    ),
    Alert(
        "FlotillaRefusedAtTheDoor",
        "ticket",
        (
            Condition(rec.REFUSED_AT_DOOR, "> 0.25"),
            Condition(
                f"sum by (job, code) (increase(flotilla_request_errors_total{{{rec.DOOR_CODES}}}[15m]))",
                f">= {LEAST_REFUSED_AT_DOOR}",
            ),
        ),
        summary="Front ends of {{ $labels.job }} refuse many requests ({{ $labels.code }}).",
        description="{{ $value | humanizePercentage }} of requests were refused with `{{ $labels.code }}` "
        "before any cell was asked, over the last 15 minutes.",
        on=("job", "code"),
        lasting="15m",
    ),
    Alert(
        "FlotillaKvPressure",
        "ticket",
        (Condition("min by (job, cell) (avg_over_time(flotilla_kv_cache_usage_ratio[10m]))", "> 0.95"),),
        summary="The KV pool of cell {{ $labels.cell }} is full.",
        description="{{ $value | humanizePercentage }} of its slots were in use over the last 10 minutes: "
        "requests wait for memory or are preempted.",
        lasting="5m",
    ),
    Alert(
        "FlotillaCostModelDrift",
        "ticket",
        (
            Condition(rec.COST_MODEL_ERROR, "> 0.5"),
            Condition(
                "sum by (job, cell, model) (increase(flotilla_cost_model_calls_total[15m]))",
                f">= {LEAST_CALLS}",
            ),
            Condition(
                f"sum by (job, cell, model) (increase({_FORWARD_SECONDS}[15m])) "
                f"/ on (job, cell) group_left () sum by (job, cell) (increase({_FORWARD_SECONDS}[15m]))",
                f">= {LEAST_SHARE}",
            ),
        ),
        summary="The cost model of {{ $labels.model }} in cell {{ $labels.cell }} is off.",
        description="Its predictions of forward times are off by {{ $value | humanizePercentage }} of the "
        "time they took, over the last 15 minutes.",
        on=("job", "cell", "model"),
        lasting="15m",
    ),
    Alert(
        "FlotillaAcceptanceCollapse",
        "ticket",
        (
            Condition(f"{rec.DRAFTER_ACCEPTANCE}15m / on (job, drafter) {rec.DRAFTER_ACCEPTANCE}1d", "< 0.5"),
            Condition(
                'sum by (job, drafter) (increase(flotilla_drafter_tokens_total{outcome="verified"}[15m]))',
                ">= 1000",
            ),
        ),
        summary="Tokens drafted by {{ $labels.drafter }} of {{ $labels.job }} are accepted far more seldom.",
        description="Its acceptance over the last 15 minutes is {{ $value | humanizePercentage }} of that "
        "over the last day.",
        on=("job", "drafter"),
        lasting="15m",
    ),
    Alert(
        "FlotillaAdmissionMispredicts",
        "ticket",
        (
            Condition(rec.ADMISSION_MISPREDICTED, "> 0.25"),
            Condition(
                "sum by (job, objective) (increase(flotilla_admission_prediction_ratio_count[15m]))",
                f">= {LEAST_REQUESTS}",
            ),
        ),
        summary="Admission of {{ $labels.job }} predicts {{ $labels.objective }} badly.",
        description="{{ $value | humanizePercentage }} of requests took more than twice the "
        "{{ $labels.objective }} predicted at their admission, over the last 15 minutes.",
        on=("job", "objective"),
        lasting="15m",
    ),
    Alert(
        "FlotillaMemberNotScraped",
        "ticket",
        (Condition("max by (job, kind, member) (flotilla_member_scraped)", "< 1"),),
        summary="{{ $labels.kind }} {{ $labels.member }} of {{ $labels.job }} does not tell its metrics.",
        description="It reports to the directory but did not answer a scrape within 3 s, for 5 minutes.",
        lasting="5m",
    ),
    Alert(
        "FlotillaScrapeAbsent",
        "page",
        (Condition("flotilla_build_info", ""),),
        summary="Prometheus has no metrics of Flotilla{{ with $labels.job }} ({{ . }}){{ end }}.",
        description="No front end has been scraped for 5 minutes: it is down, or Prometheus does not reach "
        "it; no other alert can fire.",
        lasting="5m",
        is_absence=True,
    ),
    _expiry("page", 2),
    _expiry("ticket", 14),
)
