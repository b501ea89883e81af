"""The dashboard of capacity: what limits, and what scaling makes of it."""

from __future__ import annotations

from deployments.dashboards import recording as rec
from deployments.dashboards.promql import JOB, OF_ALL_CELLS, TIERS, gauge, rate, summed
from deployments.dashboards.spec import Board, Panel, Row, Thresholds, above, series

_SIGNALS = f'{JOB}, member=~"$cell"'
_HITS = rate("flotilla_prefix_cache_hit_tokens_total")
_LOOKED_UP = rate("flotilla_prefix_cache_query_tokens_total")


def _reported(signal: str) -> str:
    return gauge("flotilla_scaling_signal", _SIGNALS, f'signal="{signal}"')


def _signal(title: str, description: str, unit: str, *names: str, thresholds: Thresholds) -> Panel:
    queries = [
        (
            f"max by (member) ({_reported(name)})",
            "{{member}}" if len(names) == 1 else f"{{{{member}}}} {name}",
        )
        for name in names
    ]
    return series(title, description, unit, *queries, thresholds=thresholds)


CAPACITY = Board(
    "flotilla-capacity",
    "Flotilla: capacity and scaling",
    "What is the limit now, and does scaling follow the load?",
    (
        Row(
            "Scaling",
            (
                series(
                    "Members by state",
                    "Cells and front ends: starting, ready, draining.",
                    "none",
                    (
                        f"max by (kind, state) ({gauge('flotilla_members', JOB)})",
                        "{{kind}} {{state}}",
                    ),
                ),
                _signal(
                    "Predicted queue delay",
                    "Of a request that came now. A cell is added while it is above "
                    "`scaling.cells.target_queue_ms` (500 ms by default).",
                    "s",
                    "queue_s",
                    thresholds=above(0.5, 5),
                ),
                _signal(
                    "Predicted attainment",
                    "Share of requests with objectives that will attain them. A cell is added while it is "
                    "below `scaling.cells.target_attainment`.",
                    "percentunit",
                    "attainment",
                    thresholds=((None, "red"), (0.95, "green")),
                ),
                _signal(
                    "Places",
                    "Requests decoded, those of the background apart, and how many may be at once.",
                    "none",
                    "running",
                    "background_running",
                    "max_running",
                    thresholds=((None, "green"),),
                ),
                _signal(
                    "Predicted time per token",
                    "With one request more, and for a request alone: how much of it is load.",
                    "s",
                    "tpot_s",
                    "idle_tpot_s",
                    thresholds=((None, "green"),),
                ),
                _signal(
                    "Tokens per cell",
                    "Committed tokens, as cells report them.",
                    "suffix: tokens/s",
                    "tokens_per_s",
                    thresholds=((None, "green"),),
                ),
            ),
        ),
        Row(
            "Memory",
            (
                series(
                    "KV pool",
                    "Share of slots in use.",
                    "percentunit",
                    (gauge("flotilla_kv_cache_usage_ratio"), "{{cell}}"),
                    maximum=1,
                    thresholds=above(0.85, 0.95),
                ),
                series(
                    "KV slots",
                    "Tokens that a pool holds.",
                    "none",
                    (gauge("flotilla_kv_cache_slots"), "{{cell}}"),
                ),
                series(
                    "Preemptions",
                    "Requests that gave their memory up and are computed again.",
                    "ops",
                    (rate("flotilla_preemptions_total", "cell"), "{{cell}}"),
                ),
                series(
                    "Prefix hits",
                    "Prompt tokens found among shared prefixes.",
                    "percentunit",
                    (f"{_HITS} / ({_LOOKED_UP} > 0)", "hits"),
                    maximum=1,
                ),
                series(
                    "Prompt tokens",
                    "Of requests that got a token.",
                    "suffix: tokens/s",
                    (rate("flotilla_prompt_tokens_total"), "prompt"),
                ),
                series(
                    "Refused for overload",
                    "Share of requests that found every queue full, or would have missed their objectives "
                    "in every cell and asked to be refused then, over 5 minutes; pages from 5 % on "
                    "(FlotillaQueueSaturated).",
                    "percentunit",
                    (f"{rec.QUEUE_REFUSALS}{{{OF_ALL_CELLS}}}", "{{tier}}"),
                    thresholds=above(0.01, 0.05),
                ),
            ),
        ),
        Row(
            "Drafters and front ends",
            (
                series(
                    "Drafter places",
                    "Requests served, and places, of all kinds.",
                    "none",
                    (summed("flotilla_drafter_requests"), "served"),
                    (summed("flotilla_drafter_capacity"), "places"),
                    dashed="places",
                    width=12,
                ),
                series(
                    "Instances by kind",
                    "Scaled by the price of a place where `scaling.drafters` is on.",
                    "none",
                    (summed("flotilla_drafters_ready", "drafter"), "{{drafter}}"),
                    is_stacked=True,
                    width=12,
                ),
                series(
                    "Open at front ends",
                    "Requests being answered, and those of them that are streamed.",
                    "none",
                    (summed("flotilla_http_requests_open", "front_end", JOB), "{{front_end}}"),
                    (summed("flotilla_http_streams_open", "front_end", JOB), "{{front_end}} streams"),
                    width=12,
                ),
                series(
                    "Refusals of cells",
                    "What a cell refused, another may have taken: how evenly they are full.",
                    "reqps",
                    (rate("flotilla_requests_rejected_total", "cell, code", TIERS), "{{cell}} {{code}}"),
                    width=12,
                ),
            ),
        ),
    ),
)
