"""Every metric there is: the single source for the code, docs/metrics.md, dashboards and alerts. Data only.

Names follow Prometheus' rules: base units, `_total` on counters and nothing else. Counters are raw; rates and
shares are left to queries. Time per output token is the mean of a request, decode time over tokens after the
first: the time between events, which other systems export under that name, says little once several tokens
come at once.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.metric import Metric, Process
from cluster.metric import counter as _counter
from cluster.metric import gauge as _gauge
from cluster.metric import histogram as _histogram
from cluster.metric_buckets import (
    BATCH_BUCKETS,
    E2E_BUCKETS,
    HTTP_BUCKETS,
    RATIO_BUCKETS,
    STEP_BUCKETS,
    TOKEN_BUCKETS,
    TPOT_BUCKETS,
    TTFT_BUCKETS,
)

#: Why an objective was missed (cluster/violations.py).
CAUSES = ("queue", "prefill", "draft", "verify", "preempt", "other")
#: Objectives; `all` is those of a request together.
OBJECTIVES = ("ttft", "tpot", "e2e")
#: Why a well-formed request is refused: counted from zero on.
REFUSALS = ("queue_full", "saturated", "slo_infeasible")
#: Why a front end refuses a request before it asks any cell: counted from zero on.
REFUSALS_AT_THE_DOOR = ("invalid_api_key", "permission_denied", "rate_limit_exceeded", "too_many_requests")


_REQUESTS = (
    _counter(
        "flotilla_requests_total",
        "Requests ended, by reason: stop, length, cancelled (by the client, or by a time limit), invalid "
        "(what the answer had to look like could not be followed), error.",
        "finish_reason",
        "tier",
    ),
    _counter(
        "flotilla_adapter_requests_total",
        "Requests ended, by the LoRA adapter that answered; empty for the target alone.",
        "adapter",
    ),
    _counter(
        "flotilla_requests_rejected_total",
        "Requests refused by a cell, by reason; another cell may have taken them.",
        "code",
        "tier",
    ),
    _gauge("flotilla_requests_running", "Requests admitted and not ended.", "tier"),
    _gauge("flotilla_requests_waiting", "Requests queued.", "tier"),
    _counter("flotilla_prompt_tokens_total", "Prompt tokens of requests that got a token."),
    _counter("flotilla_generation_tokens_total", "Output tokens committed, as they come."),
    _histogram(
        "flotilla_request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS, "tier", unit="tokens"
    ),
    _histogram(
        "flotilla_request_output_tokens", "Output tokens of a request.", TOKEN_BUCKETS, "tier", unit="tokens"
    ),
)

_LATENCY = (
    _histogram(
        "flotilla_time_to_first_token_seconds",
        "Arrival at the cell to the first token.",
        TTFT_BUCKETS,
        "tier",
    ),
    _histogram(
        "flotilla_time_per_output_token_seconds",
        "A request's mean time per output token after the first.",
        TPOT_BUCKETS,
        "tier",
    ),
    _histogram("flotilla_e2e_latency_seconds", "Arrival at the cell to the last token.", E2E_BUCKETS, "tier"),
    _histogram(
        "flotilla_queue_time_seconds",
        "Arrival to the first prompt tokens sent to the target.",
        TTFT_BUCKETS,
        "tier",
    ),
    _histogram(
        "flotilla_prefill_time_seconds", "First prompt tokens sent to the first token.", TTFT_BUCKETS, "tier"
    ),
    _histogram("flotilla_decode_time_seconds", "First token to the last.", E2E_BUCKETS, "tier"),
)

_OBJECTIVES = (
    _counter(
        "flotilla_slo_requests_total",
        "Finished requests with an objective (ttft, tpot, e2e; `all` of a request's together), by whether "
        "it was attained.",
        "objective",
        "attained",
        "tier",
    ),
    _counter(
        "flotilla_goodput_requests_total",
        "Finished requests that had objectives and attained all of them.",
        "tier",
    ),
    _counter(
        "flotilla_goodput_tokens_total",
        "Output tokens of finished requests that had objectives and attained all of them.",
        "tier",
    ),
    _counter(
        "flotilla_slo_violations_total",
        "Objectives missed, by what took most above its share: queue, prefill, draft, verify, preempt, other "
        "(scheduling, messages, other micro-batches).",
        "objective",
        "cause",
        "tier",
    ),
    _counter(
        "flotilla_admission_decisions_total",
        "Requests looked at by admission: accepted, downgraded, rejected.",
        "decision",
        "tier",
    ),
    _histogram(
        "flotilla_admission_prediction_ratio",
        "What a request took over what was predicted at its admission.",
        RATIO_BUCKETS,
        "objective",
        unit="ratio",
    ),
)

_SPECULATION = (
    _counter("flotilla_drafted_tokens_total", "Candidate tokens drafted in time."),
    _counter("flotilla_verified_tokens_total", "Draft tokens verified."),
    _counter("flotilla_accepted_tokens_total", "Draft tokens accepted."),
    _counter(
        "flotilla_drafter_tokens_total",
        "Tokens by kind of drafter: drafted (also too late, or for who was gone), verified, accepted.",
        "drafter",
        "outcome",
    ),
    _counter(
        "flotilla_drafter_depth_trees_total", "Draft trees verified that reach the depth.", "drafter", "depth"
    ),
    _counter(
        "flotilla_drafter_depth_accepted_total",
        "Draft trees of which a token at the depth was accepted.",
        "drafter",
        "depth",
    ),
    _counter("flotilla_draft_timeouts_total", "Drafts not waited for."),
    _counter(
        "flotilla_calibration_tokens_total",
        "Draft tokens whose parent was accepted: those of which it was seen whether they are.",
        "drafter",
    ),
    _counter(
        "flotilla_calibration_predicted_tokens_total",
        "Sum of their predicted chances of acceptance: what was expected to be accepted.",
        "drafter",
    ),
    _counter("flotilla_calibration_accepted_tokens_total", "How many of them were accepted.", "drafter"),
    _counter(
        "flotilla_calibration_squared_error_total",
        "Sum of (predicted chance - accepted)^2: over the tokens, the Brier score.",
        "drafter",
    ),
)

_DRAFTERS = (
    _gauge("flotilla_drafters_ready", "Drafter instances alive, by kind.", "drafter"),
    _gauge("flotilla_drafter_capacity", "Requests they may serve at once.", "drafter"),
    _gauge("flotilla_drafter_requests", "Requests served now, by drafter instance.", "drafter", "worker"),
    _gauge(
        "flotilla_drafter_capacity_price",
        "Tokens per second that one more place on drafters of the kind would have brought.",
        "drafter",
        unit="tokens per second",
    ),
    _gauge(
        "flotilla_selector_regret",
        "Tokens per second by which the drafters of the running requests are estimated to fall short of each "
        "request's best, as if all had places.",
        unit="tokens per second",
    ),
    _counter("flotilla_drafter_switches_total", "Requests that left their drafter."),
    _counter(
        "flotilla_drafter_switches_prepared_total", "Switches to drafters that had next to nothing to read."
    ),
    _counter("flotilla_drafter_preparations_wasted_total", "Caches built ahead and not used."),
    _counter(
        "flotilla_drafter_rebuild_avoided_seconds_total",
        "Seconds of reading done before the switch.",
        unit="seconds",
    ),
    _counter(
        "flotilla_drafter_switch_first_drafts_total",
        "Switches after which the new drafter drafted, by whether its cache had been built ahead.",
        "prepared",
    ),
    _counter(
        "flotilla_drafter_switch_wait_seconds_total",
        "Seconds from those switches to the first draft.",
        "prepared",
        unit="seconds",
    ),
    _counter(
        "flotilla_drafter_explorations_total", "Readings by drafters for the sake of their scores alone."
    ),
)

_STEPS = (
    _counter("flotilla_steps_total", "Verify calls answered."),
    _counter(
        "flotilla_steps_ahead_total",
        "Of those, sent before the one before was answered, by whether drafts were planned in them.",
        "drafts",
    ),
    _counter("flotilla_iterations_total", "Decode iterations: drafted, verified, committed."),
    _histogram(
        "flotilla_step_seconds", "From one verify answer to the next, while there is work.", STEP_BUCKETS
    ),
    _counter(
        "flotilla_step_phase_seconds_total",
        "Seconds of decode iterations: draft (waiting for the slowest drafter), verify (the target's "
        "forward), target (its work beside that), schedule (processor time, also where the target works "
        "meanwhile), other (messages, waiting).",
        "phase",
        unit="seconds",
    ),
    _histogram("flotilla_draft_call_seconds", "A drafter's work on a call.", STEP_BUCKETS, "drafter"),
    _histogram("flotilla_verify_call_seconds", "The target's work on a call.", STEP_BUCKETS),
    _counter(
        "flotilla_forward_seconds_total",
        "Seconds in model forwards of the target, and of all drafters together.",
        "worker",
        unit="seconds",
    ),
    _histogram(
        "flotilla_batch_requests",
        "Requests decoded, and prefilled, in a verify call that has any.",
        BATCH_BUCKETS,
        "phase",
        unit="requests",
    ),
    _counter(
        "flotilla_step_tokens_total",
        "Tokens sent to the target: of draft trees with their roots, of prompts (at most).",
        "phase",
    ),
    _counter(
        "flotilla_step_budget_tokens_total",
        "Verify budgets of the calls that decoded; over it, the decode tokens are the share of the budget "
        "used.",
    ),
    _gauge("flotilla_micro_batches", "Micro-batches the running requests are divided into."),
    _counter("flotilla_preemptions_total", "Requests preempted."),
    _counter("flotilla_key_tokens_total", "Keys the target's attention read, in each layer."),
    _counter("flotilla_padded_tokens_total", "Keys of padding it read besides."),
)

_COST = (
    _gauge(
        "flotilla_cost_model_correction_ratio",
        "Recent forward time over what the cost profile says.",
        "model",
        unit="ratio",
    ),
    _counter("flotilla_cost_model_calls_total", "Calls whose time was predicted and measured.", "model"),
    _counter(
        "flotilla_cost_model_predicted_seconds_total", "Seconds predicted for them.", "model", unit="seconds"
    ),
    _counter("flotilla_cost_model_actual_seconds_total", "Seconds they took.", "model", unit="seconds"),
    _counter(
        "flotilla_cost_model_absolute_error_seconds_total",
        "Sum of the differences between both, without sign.",
        "model",
        unit="seconds",
    ),
)

_MEMORY = (
    _gauge("flotilla_kv_cache_usage_ratio", "Share of KV slots in use.", unit="ratio"),
    _gauge("flotilla_kv_cache_slots", "Tokens the KV pool holds.", unit="tokens"),
    _counter(
        "flotilla_prefix_cache_query_tokens_total",
        "Prompt tokens looked up among shared prefixes, of ended requests.",
    ),
    _counter("flotilla_prefix_cache_hit_tokens_total", "Of those, tokens found there."),
)

_CELL = (
    _gauge("flotilla_ready", "Whether the target serves."),
    _counter("flotilla_worker_restarts_total", "Lost workers made again.", "worker"),
    _counter("flotilla_worker_stalls_total", "Workers replaced as they did not answer.", "kind", "reason"),
    _gauge("flotilla_worker_call_age_seconds", "Age of its oldest open call.", "worker", unit="seconds"),
    _gauge(
        "flotilla_config_info",
        "Always 1; its labels say what is configured.",
        "model",
        "policy",
        "selector",
        "batching",
    ),
)

_HTTP = (
    _counter("flotilla_http_requests_total", "HTTP requests answered.", "route", "method", "status"),
    _histogram(
        "flotilla_http_request_duration_seconds",
        "Request received to the last byte of its answer sent.",
        HTTP_BUCKETS,
        "route",
    ),
    _counter(
        "flotilla_http_streams_failed_total",
        "Streams that ended with an error event, by the status that the error has.",
        "route",
        "status",
    ),
    _counter("flotilla_request_errors_total", "Requests answered with an error, by its code.", "api", "code"),
    _gauge("flotilla_http_requests_open", "HTTP requests being answered, streams included."),
    _gauge("flotilla_http_streams_open", "Answers being streamed as server-sent events."),
    _counter("flotilla_grpc_calls_total", "gRPC calls ended.", "method", "code"),
    _histogram(
        "flotilla_grpc_call_duration_seconds", "gRPC call received to its end.", HTTP_BUCKETS, "method"
    ),
    _gauge("flotilla_grpc_calls_open", "gRPC calls being answered."),
    _gauge(
        "flotilla_tls_certificate_expiry_timestamp_seconds",
        "Unix time when the first of the certificates that are served expires; 0 without TLS.",
        unit="seconds",
    ),
    _counter(
        "flotilla_front_end_requests_rejected_total",
        "Requests answered with a refusal, as no cell took them, by reason.",
        "code",
        "tier",
    ),
    _counter("flotilla_requests_resubmitted_total", "Requests sent to a cell again because it was lost."),
    _counter("flotilla_idempotent_requests_total", "Requests with a key, by what became of them.", "outcome"),
    _counter("flotilla_idempotent_answers_dropped_total", "Answers no longer kept for retries.", "reason"),
    _counter("flotilla_cells_silent_total", "Connections given up as the cell gave no sign of life."),
)

_PROCESSES = (
    _gauge("flotilla_build_info", "Always 1; the version that runs.", "version", "python"),
    _counter("flotilla_process_cpu_seconds_total", "Processor time used.", unit="seconds"),
    _gauge("flotilla_process_resident_memory_bytes", "Resident memory.", unit="bytes"),
    _gauge("flotilla_process_start_time_seconds", "Unix time of the start.", unit="seconds"),
)

_MEMBERS = (
    _gauge("flotilla_members", "Members of the system (cells, front ends) by state.", "kind", "state"),
    _gauge(
        "flotilla_member_scraped", "Whether the member's metrics are part of this answer.", "kind", "member"
    ),
    _gauge(
        "flotilla_scaling_signal",
        "What members report for autoscaling and routing.",
        "kind",
        "member",
        "signal",
    ),
)

_GROUPS: tuple[tuple[str, tuple[Process, ...], tuple[Metric, ...]], ...] = (
    ("Requests and tokens", ("cell",), _REQUESTS),
    ("Latency", ("cell",), _LATENCY),
    ("Objectives", ("cell",), _OBJECTIVES),
    ("Speculation", ("cell",), _SPECULATION),
    ("Drafters and their selector", ("cell",), _DRAFTERS),
    ("Steps and batches", ("cell",), _STEPS),
    ("Cost model", ("cell",), _COST),
    ("KV pool and shared prefixes", ("cell",), _MEMORY),
    ("The cell", ("cell",), _CELL),
    ("Front ends", ("front_end",), _HTTP),
    ("Processes", ("cell", "front_end"), _PROCESSES),
    ("Members of the system", ("gathered",), _MEMBERS),
)

CATALOG: dict[str, Metric] = {
    metric.name: replace(metric, group=group, processes=processes)
    for group, processes, metrics in _GROUPS
    for metric in metrics
}


def exposed_by(process: Process) -> list[Metric]:
    """Metrics of one kind of process, in the catalog's order."""
    return [metric for metric in CATALOG.values() if process in metric.processes]
