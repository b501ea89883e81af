"""The dashboard of the cluster: which processes there are, and whether they are well."""

from __future__ import annotations

from deployments.dashboards import recording as rec
from deployments.dashboards.promql import CELLS, JOB, gauge, quantile, rate
from deployments.dashboards.spec import Board, Row, above, series, stat

_CPU, _MEMORY = "flotilla_process_cpu_seconds_total", "flotilla_process_resident_memory_bytes"
_OF_FRONT_ENDS = gauge(_MEMORY, JOB, 'front_end!=""')
_EXPIRY = gauge("flotilla_tls_certificate_expiry_timestamp_seconds", JOB)
_STARTED = gauge("flotilla_process_start_time_seconds", JOB)

CLUSTER = Board(
    "flotilla-cluster",
    "Flotilla: cluster",
    "Which processes are there, do they answer, and what do they use?",
    (
        Row(
            "Members",
            (
                stat(
                    "Scrape targets up",
                    "Of the Prometheus job, as Prometheus sees them.",
                    "none",
                    (f"sum(up{{{JOB}}})", "up"),
                    thresholds=((None, "red"), (1, "green")),
                ),
                stat(
                    "Members that told metrics",
                    "Share of cells and front ends in the last scrape.",
                    "percentunit",
                    (f"avg({gauge('flotilla_member_scraped', JOB)})", "scraped"),
                    thresholds=((None, "red"), (1, "green")),
                ),
                stat(
                    "Versions",
                    "Different versions that run; above 1 during an upgrade only.",
                    "none",
                    (f"count(count by (version) ({gauge('flotilla_build_info', JOB)}))", "versions"),
                    thresholds=((None, "green"), (2, "orange")),
                ),
                series(
                    "Members",
                    "By kind and state.",
                    "none",
                    (f"max by (kind, state) ({gauge('flotilla_members', JOB)})", "{{kind}} {{state}}"),
                    width=12,
                    height=5,
                ),
                series(
                    "Targets that serve",
                    "1 while the cell's target serves.",
                    "none",
                    (gauge("flotilla_ready"), "{{cell}}"),
                    maximum=1,
                ),
                series(
                    "Workers made again",
                    "In 15 minutes it is a ticket from 4 on (FlotillaRestartsFlapping).",
                    "ops",
                    (rate("flotilla_worker_restarts_total", "cell, worker"), "{{cell}} {{worker}}"),
                ),
                series(
                    "Workers that did not answer",
                    "Replaced as they gave no sign of life (silent) or did not end a call (stuck); in 15 "
                    "minutes it is a ticket from 3 on (FlotillaWorkersStalling).",
                    "ops",
                    (rate("flotilla_worker_stalls_total", "kind, reason"), "{{kind}} {{reason}}"),
                ),
                series(
                    "Age of the oldest call",
                    "What a worker has not answered; high for long is a long prompt, or a stall.",
                    "s",
                    (
                        f"max by (cell, worker) ({gauge('flotilla_worker_call_age_seconds')})",
                        "{{cell}} {{worker}}",
                    ),
                ),
                series(
                    "Configuration",
                    "What is configured, in the legend.",
                    "none",
                    (
                        gauge("flotilla_config_info", f'{JOB}, model=~"$model", cell=~"$cell"'),
                        "{{cell}}: {{model}}, {{policy}}, {{selector}}, {{batching}}",
                    ),
                ),
            ),
        ),
        Row(
            "Processes",
            (
                series(
                    "Processor, cells",
                    "Cores used. A scheduler at one core is the limit of its cell.",
                    "none",
                    (rate(_CPU, "cell"), "{{cell}}"),
                ),
                series(
                    "Processor, front ends",
                    "Cores used.",
                    "none",
                    (rate(_CPU, "front_end", JOB, 'front_end!=""'), "{{front_end}}"),
                ),
                series(
                    "Memory",
                    "Resident.",
                    "bytes",
                    (f"sum by (cell) ({gauge(_MEMORY, CELLS)})", "cell {{cell}}"),
                    (
                        f"sum by (front_end) ({_OF_FRONT_ENDS})",
                        "front end {{front_end}}",
                    ),
                ),
                series(
                    "Time since the start",
                    "Of every process; a saw shows restarts.",
                    "s",
                    (f"time() - {_STARTED}", "{{cell}}{{front_end}}"),
                ),
                series(
                    "Time of a scrape",
                    "Beyond 3 s members are left out.",
                    "s",
                    (f"scrape_duration_seconds{{{JOB}}}", "{{instance}}"),
                    thresholds=((None, "green"), (3, "red")),
                ),
                series(
                    "Requests sent again",
                    "To another cell because theirs was lost. Clients do not notice, but they wait.",
                    "reqps",
                    (rate("flotilla_requests_resubmitted_total", "", JOB), "resubmitted"),
                    (rate("flotilla_cells_silent_total", "", JOB), "cells left as silent"),
                ),
                series(
                    "Requests with a key",
                    "New ones, and those sent again, by what became of them.",
                    "reqps",
                    (rate("flotilla_idempotent_requests_total", "outcome", JOB), "{{outcome}}"),
                    (
                        rate("flotilla_idempotent_answers_dropped_total", "reason", JOB),
                        "dropped: {{reason}}",
                    ),
                ),
            ),
        ),
        Row(
            "HTTP and gRPC",
            (
                series(
                    "HTTP requests",
                    "By route and status.",
                    "reqps",
                    (rate("flotilla_http_requests_total", "route, status", JOB), "{{route}} {{status}}"),
                ),
                series(
                    "HTTP duration p95",
                    "To the last byte; streams last as long as their answer.",
                    "s",
                    (
                        quantile(0.95, "flotilla_http_request_duration_seconds", by="route", labels=JOB),
                        "{{route}}",
                    ),
                ),
                series(
                    "Requests answered with an error",
                    "By the error's code; the log has the field at fault (message `refused`).",
                    "reqps",
                    (rate("flotilla_request_errors_total", "api, code", JOB), "{{api}} {{code}}"),
                ),
                series(
                    "Refused at the door",
                    "Share of requests that front ends refused for their key or its limits, or as too many "
                    "were open, over 15 minutes; a ticket from 25 % on (FlotillaRefusedAtTheDoor).",
                    "percentunit",
                    (f"{rec.REFUSED_AT_DOOR}{{{JOB}}}", "{{code}}"),
                    maximum=1,
                    thresholds=above(0.1, 0.25),
                ),
                series(
                    "Time until the certificate expires",
                    "Of the first that does; 0 without TLS. Below 14 days a ticket, below 2 a page "
                    "(FlotillaCertificateExpires14d, FlotillaCertificateExpires2d).",
                    "s",
                    (f"({_EXPIRY} > 0) - time() or 0 * {_EXPIRY}", "{{front_end}}"),
                ),
                series(
                    "gRPC calls",
                    "By method and code; 0 where gRPC is off.",
                    "reqps",
                    (rate("flotilla_grpc_calls_total", "method, code", JOB), "{{method}} {{code}}"),
                ),
                series(
                    "gRPC duration p95",
                    "To the end of the call; nothing without calls.",
                    "s",
                    (
                        quantile(0.95, "flotilla_grpc_call_duration_seconds", by="method", labels=JOB),
                        "{{method}}",
                    ),
                ),
                series(
                    "gRPC calls open",
                    "Being answered.",
                    "none",
                    (gauge("flotilla_grpc_calls_open", JOB), "{{front_end}}"),
                ),
            ),
        ),
    ),
)
