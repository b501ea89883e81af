"""The dashboard of the scheduler: where the time of a step goes, and how well it was predicted."""

from __future__ import annotations

from deployments.dashboards import recording as rec
from deployments.dashboards.promql import JOB, buckets, gauge, mean, quantiles, rate
from deployments.dashboards.spec import Board, Row, above, heatmap, series

_PHASES = rate("flotilla_step_phase_seconds_total", "phase")
# Where there is none, the scheduler has worked all the same.
_ITERATIONS = f"scalar({rate('flotilla_iterations_total')} > 0)"
_DECODED = rate("flotilla_step_tokens_total", more='phase="decode"')
_KEYS = rate("flotilla_key_tokens_total")
_PADDED = rate("flotilla_padded_tokens_total")
_SECONDS = "flotilla_cost_model"
_ACTUAL = rate(f"{_SECONDS}_actual_seconds_total", "model")

STEPS = Board(
    "flotilla-steps",
    "Flotilla: scheduler and step time",
    "Where does the time of a step go, is the budget used, and does the cost model know?",
    (
        Row(
            "Step time",
            (
                series(
                    "Step",
                    "From one verify answer to the next, while there is work.",
                    "s",
                    *quantiles("flotilla_step_seconds"),
                ),
                heatmap(
                    "Steps by duration",
                    "How many steps took how long. Two bands: steps with and without prompts.",
                    "s",
                    buckets("flotilla_step_seconds"),
                ),
                series(
                    "Phases of an iteration",
                    "Mean seconds. draft: waiting for the slowest drafter; verify: the target's forward; "
                    "target: its work beside that; schedule: our own processor time, also where the target "
                    "works meanwhile; other: messages and waiting.",
                    "s",
                    (f"{_PHASES} / {_ITERATIONS}", "{{phase}}"),
                    is_stacked=True,
                ),
                series(
                    "Share of phases",
                    "The same as shares of their sum. That is above the time of iterations by what was "
                    "scheduled while the target worked; other is what the rest leaves of it, maybe nothing.",
                    "percentunit",
                    (f"{_PHASES} / scalar({rate('flotilla_step_phase_seconds_total')})", "{{phase}}"),
                    maximum=1,
                    is_stacked=True,
                ),
                series(
                    "Verify call",
                    "The target's work on a call.",
                    "s",
                    *quantiles("flotilla_verify_call_seconds"),
                ),
                series(
                    "Time in forwards",
                    "Seconds per second, of the target and of all drafters together.",
                    "percentunit",
                    (rate("flotilla_forward_seconds_total", "worker"), "{{worker}}"),
                ),
            ),
        ),
        Row(
            "Batches",
            (
                series(
                    "Requests in a call",
                    "Mean, of calls that have any.",
                    "none",
                    (mean("flotilla_batch_requests", "phase"), "{{phase}}"),
                ),
                series(
                    "Tokens sent to the target",
                    "decode: draft trees with their roots; prefill: prompts.",
                    "suffix: tokens/s",
                    (rate("flotilla_step_tokens_total", "phase"), "{{phase}}"),
                    is_stacked=True,
                ),
                series(
                    "Budget used",
                    "Decode tokens over the verify budgets. Low: no drafts worth verifying; 1: the budget "
                    "limits the trees.",
                    "percentunit",
                    (f"{_DECODED} / {rate('flotilla_step_budget_tokens_total')}", "used"),
                    maximum=1,
                ),
                series(
                    "Calls and iterations",
                    "Verify calls answered, decode iterations committed, and calls that had been sent before "
                    "the one before was answered: the target begins one as it ends the other.",
                    "ops",
                    (rate("flotilla_steps_total"), "calls"),
                    (rate("flotilla_steps_ahead_total", "drafts"), "sent ahead, drafts: {{drafts}}"),
                    (rate("flotilla_iterations_total"), "iterations"),
                ),
                series(
                    "Micro-batches",
                    "Parts that the running requests are divided into, so that drafters and target overlap.",
                    "none",
                    (gauge("flotilla_micro_batches"), "{{cell}}"),
                ),
                series(
                    "Padding read by attention",
                    "Keys of padding over all keys read.",
                    "percentunit",
                    (f"{_PADDED} / ({_PADDED} + {_KEYS})", "padding"),
                    maximum=1,
                ),
            ),
        ),
        Row(
            "Cost model",
            (
                series(
                    "Error of predictions",
                    "Mean difference between predicted and measured forward times, over the measured.",
                    "percentunit",
                    (
                        f"{rate(f'{_SECONDS}_absolute_error_seconds_total', 'model')} / ({_ACTUAL} > 0)",
                        "{{model}}",
                    ),
                    thresholds=above(0.25, 0.5),
                ),
                series(
                    "Predicted over measured",
                    "1 without bias. Above: plans are too timid; below: too bold.",
                    "none",
                    (
                        f"{rate(f'{_SECONDS}_predicted_seconds_total', 'model')} / ({_ACTUAL} > 0)",
                        "{{model}}",
                    ),
                ),
                series(
                    "Correction in use",
                    "Recent forward time over what the profile says. Far from 1: profile this machine again.",
                    "none",
                    (
                        f"max by (cell, model) ({gauge('flotilla_cost_model_correction_ratio')})",
                        "{{cell}} {{model}}",
                    ),
                ),
                series(
                    "Error over 15 minutes",
                    "As recorded; a ticket from 0.5 on (FlotillaCostModelDrift).",
                    "percentunit",
                    (f'{rec.COST_MODEL_ERROR}{{{JOB}, cell=~"$cell"}}', "{{cell}} {{model}}"),
                    width=12,
                    thresholds=above(0.25, 0.5),
                ),
                series(
                    "Calls predicted and measured",
                    "What the errors are a mean of.",
                    "ops",
                    (rate(f"{_SECONDS}_calls_total", "model"), "{{model}}"),
                    width=12,
                ),
            ),
        ),
    ),
)
