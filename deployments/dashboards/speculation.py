"""The dashboard of drafters and their selector: is speculation worth its time, and who drafts."""

from __future__ import annotations

from deployments.dashboards import recording as rec
from deployments.dashboards.promql import JOB, gauge, quantile, rate, summed
from deployments.dashboards.spec import Board, Row, series


def _outcome(outcome: str) -> str:
    return rate("flotilla_drafter_tokens_total", "drafter", more=f'outcome="{outcome}"')


def _calibrated(what: str) -> str:
    tried = rate("flotilla_calibration_tokens_total", "drafter")
    return f"{rate(f'flotilla_calibration_{what}_total', 'drafter')} / ({tried} > 0)"


_ACCEPTED, _VERIFIED, _DRAFTED = _outcome("accepted"), _outcome("verified"), _outcome("drafted")
_DEPTH = "flotilla_drafter_depth"
_WAITED = rate("flotilla_drafter_switch_wait_seconds_total", "prepared")
_FIRST = rate("flotilla_drafter_switch_first_drafts_total", "prepared")

SPECULATION = Board(
    "flotilla-speculation",
    "Flotilla: drafters and selector",
    "Is speculation worth its time, which drafters are good, and does the selector know?",
    (
        Row(
            "Yield",
            (
                series(
                    "Tokens per verify call",
                    "Committed tokens over verify calls, all requests of a batch together, prompts included.",
                    "none",
                    (
                        f"{rate('flotilla_generation_tokens_total')} / {rate('flotilla_steps_total')}",
                        "tokens",
                    ),
                ),
                series(
                    "Draft tokens",
                    "Drafted: came in time; verified: sent to the target; accepted: part of the output. Much "
                    "drafted and not verified is work for nothing.",
                    "suffix: tokens/s",
                    (rate("flotilla_drafted_tokens_total"), "drafted"),
                    (rate("flotilla_verified_tokens_total"), "verified"),
                    (rate("flotilla_accepted_tokens_total"), "accepted"),
                ),
                series(
                    "Drafts not waited for",
                    "The scheduler went on without them.",
                    "ops",
                    (rate("flotilla_draft_timeouts_total"), "timeouts"),
                ),
            ),
        ),
        Row(
            "Acceptance",
            (
                series(
                    "Accepted of verified",
                    "By drafter. A sudden fall: other texts, or drafter and target no longer fit.",
                    "percentunit",
                    (f"{_ACCEPTED} / ({_VERIFIED} > 0)", "{{drafter}}"),
                    maximum=1,
                ),
                series(
                    "Acceptance now and over a day",
                    "15 minutes and a day; half of the day's is a ticket (FlotillaAcceptanceCollapse).",
                    "percentunit",
                    (f"{rec.DRAFTER_ACCEPTANCE}15m{{{JOB}}}", "{{drafter}} 15m"),
                    (f"{rec.DRAFTER_ACCEPTANCE}1d{{{JOB}}}", "{{drafter}} 1d"),
                    maximum=1,
                    dashed=".* 1d",
                ),
                series(
                    "Acceptance by depth",
                    "Of trees that reach the depth, those with an accepted token there.",
                    "percentunit",
                    (
                        f"{rate(_DEPTH + '_accepted_total', 'drafter, depth')}"
                        f" / ({rate(_DEPTH + '_trees_total', 'drafter, depth')} > 0)",
                        "{{drafter}} {{depth}}",
                    ),
                    maximum=1,
                ),
                series(
                    "Drafted tokens by drafter",
                    "Candidate tokens, in time or not.",
                    "suffix: tokens/s",
                    (_DRAFTED, "{{drafter}}"),
                    is_stacked=True,
                ),
                series(
                    "Predicted and seen acceptance",
                    "Of tokens whose parent was accepted. Lines that part: the scheduler plans trees by "
                    "wrong chances.",
                    "percentunit",
                    (_calibrated("predicted_tokens"), "{{drafter}} predicted"),
                    (_calibrated("accepted_tokens"), "{{drafter}} seen"),
                    maximum=1,
                    dashed=".* predicted",
                ),
                series(
                    "Brier score",
                    "Mean squared error of the predicted chances; 0.25 is guessing.",
                    "none",
                    (_calibrated("squared_error"), "{{drafter}}"),
                    thresholds=((None, "green"), (0.25, "red")),
                ),
            ),
        ),
        Row(
            "Drafters",
            (
                series(
                    "Instances alive",
                    "By kind. None of a kind: it is being made again, or failed for good (`flotilla drafters "
                    "list`).",
                    "none",
                    (summed("flotilla_drafters_ready", "drafter"), "{{drafter}}"),
                ),
                series(
                    "Places in use",
                    "Requests served over those that may be served at once.",
                    "percentunit",
                    (
                        f"{summed('flotilla_drafter_requests', 'drafter')}"
                        f" / ({summed('flotilla_drafter_capacity', 'drafter')} > 0)",
                        "{{drafter}}",
                    ),
                    maximum=1,
                    thresholds=((None, "green"), (1, "orange")),
                ),
                series(
                    "Draft call p95",
                    "A drafter's work on a call. Steps wait for the slowest.",
                    "s",
                    (quantile(0.95, "flotilla_draft_call_seconds", by="drafter"), "{{drafter}}"),
                ),
            ),
        ),
        Row(
            "Selector",
            (
                series(
                    "Price of a place",
                    "Tokens per second that one more place on the kind would have brought; 0 where there is "
                    "room, or the selector does not estimate it. High for long: more replicas.",
                    "suffix: tokens/s",
                    (f"max by (drafter) ({gauge('flotilla_drafter_capacity_price')})", "{{drafter}}"),
                ),
                series(
                    "Estimated regret",
                    "Tokens per second short of each request's best drafter, as if all had places.",
                    "suffix: tokens/s",
                    (gauge("flotilla_selector_regret"), "{{cell}}"),
                ),
                series(
                    "Switches",
                    "Requests that left their drafter; prepared: the new one had read the text before.",
                    "ops",
                    (rate("flotilla_drafter_switches_total"), "all"),
                    (rate("flotilla_drafter_switches_prepared_total"), "prepared"),
                ),
                series(
                    "Waiting after switches",
                    "Seconds per second, by whether the cache had been built ahead.",
                    "percentunit",
                    (_WAITED, "prepared: {{prepared}}"),
                ),
                series(
                    "First drafts after switches",
                    "Waiting over these is the wait of one switch.",
                    "ops",
                    (_FIRST, "prepared: {{prepared}}"),
                ),
                series(
                    "Readings ahead",
                    "For scores alone, built and not used, and seconds of reading that were done before a "
                    "switch.",
                    "ops",
                    (rate("flotilla_drafter_explorations_total"), "explorations"),
                    (rate("flotilla_drafter_preparations_wasted_total"), "wasted"),
                    (rate("flotilla_drafter_rebuild_avoided_seconds_total"), "seconds avoided"),
                ),
            ),
        ),
    ),
)
