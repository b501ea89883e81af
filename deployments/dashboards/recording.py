"""Recording rules: attainment, error-budget burn and health, by the windows that alerts look at.

Attainment is of requests with objectives, by tier: `objective="all"` of `flotilla_slo_requests_total`. The
burn rate is the share that missed over the share that may miss (The Site Reliability Workbook, chapter 5): at
1 the budget of a month lasts a month. A tier without requests in a window has no series for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.metric_catalog import REFUSALS_AT_THE_DOOR

WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
#: Groups of windows that are computed as often.
_INTERVALS = {"30s": ("5m", "30m", "1h", "2h"), "2m": ("6h", "1d", "3d")}
#: The fastest page is for 14.4 times the sustainable rate, which a budget above 1/14.4 can never burn at.
FASTEST = 14.4
LEAST_TARGET = 0.94
#: Routes and calls that generate, and codes of calls that failed here: a client may set its own deadline.
_GENERATING = "/v1/(chat/)?completions|/v1/responses|/v1/messages"
_OPEN = "/health|/ready|/ping|/console.*"
_GENERATING_CALLS = "Generate|GenerateStream"
_FAILED_CALLS = "INTERNAL|UNAVAILABLE|UNKNOWN|DATA_LOSS"


@dataclass(frozen=True, slots=True)
class SloTargets:
    """Shares of requests that are to attain their objectives.

    Attributes:
        default: of tiers that are not named.
        tiers: of others.

    Raises:
        ValueError: if one is out of range.
    """

    default: float = 0.95
    tiers: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, target in {"default": self.default, **self.tiers}.items():
            if not LEAST_TARGET <= target < 1.0:
                raise ValueError(
                    f"the target of tier `{name}` is {target:g}: it must be at least {LEAST_TARGET:g} and "
                    f"below 1, since with a larger error budget no burn of {FASTEST:g} times it is possible"
                )


@dataclass(frozen=True, slots=True)
class RecordingRule:
    """A series that Prometheus computes from others; `labels` are added to those of the expression."""

    record: str
    expr: str
    labels: Mapping[str, str] = field(default_factory=dict)

    def as_yaml(self) -> dict[str, object]:
        """As in a rule file."""
        rule: dict[str, object] = {"record": self.record, "expr": self.expr}
        return rule | ({"labels": dict(self.labels)} if self.labels else {})


@dataclass(frozen=True, slots=True)
class RuleGroup:
    """Rules computed together, in order."""

    name: str
    rules: tuple[RecordingRule, ...]
    interval: str = "30s"


def attainment(window: str) -> str:
    """Name of the recorded attainment of a window."""
    return f"flotilla:slo_attainment:ratio_rate{window}"


def burn(window: str) -> str:
    """Name of the recorded burn rate of a window."""
    return f"flotilla:slo_burn:ratio_rate{window}"


def judged(window: str) -> str:
    """Name of the recorded number of requests that had objectives in a window."""
    return f"flotilla:slo_requests:increase{window}"


TARGET = "flotilla:slo_target:ratio"
DRAFTER_ACCEPTANCE = "flotilla:drafter_acceptance:ratio_rate"
#: Codes of refusals because more is asked than the cells serve: at the queue's bound, or, where a tier would
#: rather be refused than late, because its objectives would be missed. What an idle cell could not do either
#: (`slo_infeasible`) is no overload.
OVERLOAD_CODES = 'code=~"queue_full|saturated"'
QUEUE_REFUSALS = "flotilla:queue_refusals:ratio_rate5m"
#: Codes of refusals before any cell is asked: for the key, its limits, or those of the front end.
DOOR_CODES = f'code=~"{"|".join(REFUSALS_AT_THE_DOOR)}"'
REFUSED_AT_DOOR = "flotilla:refused_at_the_door:ratio_rate15m"
REQUESTS_FAILED = "flotilla:requests_failed:ratio_rate5m"
NUM_REQUESTS_FAILED = "flotilla:requests_failed:increase15m"
COST_MODEL_ERROR = "flotilla:cost_model_error:ratio_rate15m"
ADMISSION_MISPREDICTED = "flotilla:admission_mispredicted:ratio_rate15m"
CELLS_READY = "flotilla:cells_ready:sum"


def target_group(targets: SloTargets) -> RuleGroup:
    """The targets as series, by tier."""
    parts = [
        f'{target:g} * group by (job, tier) (flotilla_slo_requests_total{{tier="{tier}"}})'
        for tier, target in targets.tiers.items()
    ]
    parts.append(f"{targets.default:g} * group by (job, tier) (flotilla_slo_requests_total)")
    return RuleGroup("flotilla-slo-target", (RecordingRule(TARGET, "\nor ".join(parts)),))


def recording_groups() -> list[RuleGroup]:
    """All other groups."""
    groups = [
        RuleGroup(
            f"flotilla-slo-{index}", tuple(rule for window in windows for rule in _slo(window)), interval
        )
        for index, (interval, windows) in enumerate(_INTERVALS.items(), start=1)
    ]
    return [*groups, RuleGroup("flotilla-health", _health())]


def _slo(window: str) -> list[RecordingRule]:
    name = "flotilla_slo_requests_total"
    kept = f'sum by (job, tier) (rate({name}{{objective="all", attained="true"}}[{window}]))'
    every = f'sum by (job, tier) (rate({name}{{objective="all"}}[{window}]))'
    # The tier of a request may be one that has never been attained, and has no such series.
    ratio = f"({kept} or 0 * {every})\n/ ({every} > 0)"
    return [
        RecordingRule(attainment(window), ratio),
        RecordingRule(judged(window), f'sum by (job, tier) (increase({name}{{objective="all"}}[{window}]))'),
        RecordingRule(burn(window), f"(1 - {attainment(window)})\n/ on (job, tier) (1 - {TARGET})"),
    ]


def _health() -> tuple[RecordingRule, ...]:
    tokens = "flotilla_drafter_tokens_total"
    rules = [RecordingRule(CELLS_READY, _cells_ready())]
    for window in ("15m", "1d"):
        accepted, verified = (
            f'sum by (job, drafter) (rate({tokens}{{outcome="{outcome}"}}[{window}]))'
            for outcome in ("accepted", "verified")
        )
        rules.append(RecordingRule(f"{DRAFTER_ACCEPTANCE}{window}", f"{accepted}\n/ ({verified} > 0)"))
    error, actual = (
        f"sum by (job, cell, model) (rate(flotilla_cost_model_{part}_seconds_total[15m]))"
        for part in ("absolute_error", "actual")
    )
    ratio = "flotilla_admission_prediction_ratio"
    within = f'sum by (job, objective) (rate({ratio}_bucket{{le="2.0"}}[15m]))'
    judged_all = f"sum by (job, objective) (rate({ratio}_count[15m]))"
    rules += [
        RecordingRule(QUEUE_REFUSALS, _queue_refusals()),
        RecordingRule(REFUSED_AT_DOOR, _refused_at_door()),
        *_failures(),
        RecordingRule(COST_MODEL_ERROR, f"{error}\n/ ({actual} > 0)"),
        RecordingRule(ADMISSION_MISPREDICTED, f"1 - {within}\n/ ({judged_all} > 0)"),
    ]
    return tuple(rules)


def _queue_refusals() -> str:
    # Of front ends: a cell's refusal is none where another cell takes the request.
    name = "flotilla_front_end_requests_rejected_total"
    refused = f"sum by (job, tier) (rate({name}{{{OVERLOAD_CODES}}}[5m]))"
    every = f"sum by (job, tier) (rate({name}[5m]))"
    admitted = 'sum by (job, tier) (rate(flotilla_admission_decisions_total{decision!="rejected"}[5m]))'
    return f"{refused}\n/ ({every} + {admitted} > 0)"


def _refused_at_door() -> str:
    refused = f"sum by (job, code) (rate(flotilla_request_errors_total{{{DOOR_CODES}}}[15m]))"
    # Any path but the open ones may be refused for its key. Refusals are counted as errors and by a status
    # that has no series before: only of the same series is this a share.
    answered = f'flotilla_http_requests_total{{route!~"{_OPEN}", status!~"[45].."}}'
    called = 'flotilla_grpc_calls_total{code="OK"}'
    every = _grown("rate", (answered, called, "flotilla_request_errors_total"), "15m")
    return f"{refused}\n/ on (job) group_left () ({every} > 0)"


def _failures() -> Iterator[RecordingRule]:
    """Shares and numbers of requests that failed through no fault of the client's, by who saw it.

    A stream that ends with an error began with a 200, and is counted a second time, by the error's status.
    """
    http, streams = (
        f'flotilla_http_{what}_total{{route=~"{_GENERATING}"' for what in ("requests", "streams_failed")
    )
    grpc = f'flotilla_grpc_calls_total{{method=~"{_GENERATING_CALLS}"'
    ended = "flotilla_requests_total"
    sides = {
        "front_end": (
            (
                f'{http}, status=~"5.."}}',
                f'{streams}, status=~"5.."}}',
                f'{grpc}, code=~"{_FAILED_CALLS}"}}',
            ),
            (f"{http}}}", f"{grpc}}}"),
        ),
        "cell": ((f'{ended}{{finish_reason="error"}}',), (ended,)),
    }
    for side, (failed, every) in sides.items():
        labels = {"seen_by": side}
        share, all_of = _grown("rate", failed, "5m"), _grown("rate", every, "5m")
        # A status has no series before it was first answered.
        yield RecordingRule(REQUESTS_FAILED, f"({share} or 0 * {all_of})\n/ ({all_of} > 0)", labels)
        number, all_of = _grown("increase", failed, "15m"), _grown("increase", every, "15m")
        yield RecordingRule(NUM_REQUESTS_FAILED, f"{number}\nor 0 * {all_of}", labels)


def _grown(function: str, names: Sequence[str], window: str) -> str:
    # `or` adds up HTTP and gRPC, whose labels differ, also where one of them is not there.
    return f"sum by (job) ({' or '.join(f'{function}({name}[{window}])' for name in names)})"


def _cells_ready() -> str:
    # Where no cell is left, its front ends still tell that there is a system.
    return "sum by (job) (flotilla_ready)\nor 0 * sum by (job) (flotilla_http_requests_open)"
