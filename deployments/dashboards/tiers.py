"""The dashboard of service tiers: what each of them was promised and got."""

from __future__ import annotations

from deployments.dashboards.promql import OF_ALL_CELLS, TIERS, mean, quantile, quantiles, rate, summed
from deployments.dashboards.spec import Board, Panel, Row, above, series

_SLO = "flotilla_slo_requests_total"


def _attained(objective: str) -> tuple[str, str]:
    chosen = f'objective="{objective}"'
    kept = rate(_SLO, "tier", TIERS, f'{chosen}, attained="true"')
    every = rate(_SLO, "tier", TIERS, chosen)
    return f"{kept} / ({every} > 0)", "{{tier}}"


def _attainment(objective: str, meaning: str, target: float) -> Panel:
    return series(
        f"Attainment of {meaning}",
        f"Share of requests with an objective for {meaning} that attained it. No line without such requests.",
        "percentunit",
        _attained(objective),
        maximum=1,
        thresholds=((None, "red"), (target, "green")),
    )


def _latency(title: str, name: str, description: str) -> Panel:
    return series(
        f"{title} p95", description, "s", (quantile(0.95, name, by="tier", labels=TIERS), "{{tier}}")
    )


def tier_board(target: float) -> Board:
    """The dashboard; `target` is the share of requests that are to attain their objectives."""
    return Board(
        "flotilla-tiers",
        "Flotilla: tiers",
        "What each tier was promised, what it got, and what it was refused.",
        (
            Row(
                "Objectives",
                (
                    _attainment("ttft", "the time to the first token", target),
                    _attainment("tpot", "the time per output token", target),
                    _attainment("e2e", "the time to the last token", target),
                    series(
                        "Requests with objectives",
                        "Finished ones. What attainment is a share of: few requests make it jump.",
                        "reqps",
                        (rate(_SLO, "tier", TIERS, 'objective="all"'), "{{tier}}"),
                    ),
                    series(
                        "Goodput in requests",
                        "Finished requests that attained all objectives they had.",
                        "reqps",
                        (rate("flotilla_goodput_requests_total", "tier", TIERS), "{{tier}}"),
                    ),
                    series(
                        "Goodput in tokens",
                        "Output tokens of those requests.",
                        "suffix: tokens/s",
                        (rate("flotilla_goodput_tokens_total", "tier", TIERS), "{{tier}}"),
                    ),
                    series(
                        "Misses by tier and cause",
                        "What took most above its share of the time that the objective allowed.",
                        "reqps",
                        (rate("flotilla_slo_violations_total", "tier, cause", TIERS), "{{tier}} {{cause}}"),
                        width=12,
                        is_stacked=True,
                    ),
                    series(
                        "Misses by objective and cause",
                        "The same by the objective that was missed.",
                        "reqps",
                        (
                            rate("flotilla_slo_violations_total", "objective, cause", TIERS),
                            "{{objective}} {{cause}}",
                        ),
                        width=12,
                        is_stacked=True,
                    ),
                ),
            ),
            Row(
                "Latency",
                (
                    _latency(
                        "Time to first token",
                        "flotilla_time_to_first_token_seconds",
                        "Queue and prefill together.",
                    ),
                    _latency(
                        "Time per output token",
                        "flotilla_time_per_output_token_seconds",
                        "Mean of a request after its first token.",
                    ),
                    _latency(
                        "End to end", "flotilla_e2e_latency_seconds", "Arrival at the cell to the last token."
                    ),
                    _latency(
                        "Queue",
                        "flotilla_queue_time_seconds",
                        "Arrival to the first prompt tokens at the target.",
                    ),
                    _latency(
                        "Prefill",
                        "flotilla_prefill_time_seconds",
                        "First prompt tokens sent to the first token.",
                    ),
                    _latency("Decode", "flotilla_decode_time_seconds", "First token to the last."),
                ),
            ),
            Row(
                "Admission",
                (
                    series(
                        "Decisions",
                        "Of cells. downgraded: served on a lower tier's terms; rejected: refused, and "
                        "offered to another cell.",
                        "reqps",
                        (
                            rate("flotilla_admission_decisions_total", "tier, decision", TIERS),
                            "{{tier}} {{decision}}",
                        ),
                        is_stacked=True,
                    ),
                    series(
                        "Refusals",
                        "What no cell took, by tier and reason (docs/objectives.md).",
                        "reqps",
                        (
                            rate("flotilla_front_end_requests_rejected_total", "tier, code", OF_ALL_CELLS),
                            "{{tier}} {{code}}",
                        ),
                        is_stacked=True,
                    ),
                    series(
                        "Taken over predicted",
                        "What requests took over what was predicted at their admission; 1 is exact. Above 2 "
                        "often, admission lets in what it cannot serve.",
                        "none",
                        *quantiles("flotilla_admission_prediction_ratio", (0.5, 0.9), by="objective"),
                        thresholds=above(1.5, 2),
                    ),
                ),
            ),
            Row(
                "Load",
                (
                    series(
                        "Running",
                        "Requests admitted and not ended.",
                        "none",
                        (summed("flotilla_requests_running", "tier", TIERS), "{{tier}}"),
                        is_stacked=True,
                    ),
                    series(
                        "Waiting",
                        "Requests queued.",
                        "none",
                        (summed("flotilla_requests_waiting", "tier", TIERS), "{{tier}}"),
                        is_stacked=True,
                    ),
                    series(
                        "Ended",
                        "By tier and reason.",
                        "reqps",
                        (
                            rate("flotilla_requests_total", "tier, finish_reason", TIERS),
                            "{{tier}} {{finish_reason}}",
                        ),
                    ),
                    series(
                        "Prompt tokens of a request",
                        "Mean.",
                        "none",
                        (mean("flotilla_request_prompt_tokens", "tier", TIERS), "{{tier}}"),
                    ),
                    series(
                        "Output tokens of a request",
                        "Mean.",
                        "none",
                        (mean("flotilla_request_output_tokens", "tier", TIERS), "{{tier}}"),
                    ),
                    series(
                        "Ended, by model",
                        "Of all tiers: the target, and its LoRA adapters.",
                        "reqps",
                        (
                            "label_replace("
                            + rate("flotilla_adapter_requests_total", "adapter")
                            + ', "adapter", "target", "adapter", "")',
                            "{{adapter}}",
                        ),
                        is_stacked=True,
                    ),
                ),
            ),
        ),
    )
