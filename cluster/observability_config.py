"""Configuration of metrics, logs and traces."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from cluster.placement_config import StrictModel


class MetricsConfig(StrictModel):
    """Where Prometheus scrapes. Any front end answers for the whole system, every process exactly once."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="Where `port` listens; loopback unless told otherwise."
    )
    port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="`/metrics` is served on a port of its own; on that of the API if unset.",
    )


class LogConfig(StrictModel):
    """What front ends, cells and their workers log. Never prompts, outputs or secrets."""

    format: Literal["text", "json"] = Field(default="text", description="`json` is one object per line.")
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="At `info`, front ends log one line per request."
    )
    file: Path | None = Field(
        default=None,
        description="All processes of a machine append to this file; if unset, each to one of its own in "
        "Ray's session (docs/observability.md).",
    )


class TelemetryConfig(StrictModel):
    """OpenTelemetry traces, one per request; off without an endpoint.

    Needs the extra `otel` (`pip install -e '.[otel]'`).
    """

    otlp_endpoint: str | None = Field(
        default=None,
        pattern="^https?://",
        description="Collector's OTLP/HTTP address, such as `http://localhost:4318`.",
    )
    service_name: str = Field(default="flotilla", description="Resource attribute `service.name`.")
    sample_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Share of requests traced, of those whose `traceparent` header does not say.",
    )


class DebugConfig(StrictModel):
    """A record of what was decided in each step; costs nothing while off."""

    decisions: int = Field(
        default=0, ge=0, le=100_000, description="Newest steps kept for `GET /debug/decisions`; 0 is off."
    )
    decisions_file: Path | None = Field(
        default=None, description="JSON lines to which every step is appended, for `flotilla replay`."
    )
    timeline: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Newest slices of work, of all workers, kept for `GET /debug/timeline`; 0 is off.",
    )
