"""Whether traces reach their collector, told in our log: OpenTelemetry tells it in files of Ray's alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from urllib.parse import urlsplit

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

_log = logging.getLogger(__name__)


class ToldExporter(SpanExporter):
    """An exporter of which the log says when it begins to fail, and when it does not any longer.

    Args:
        exporter: what exports.
        endpoint: where to, for the log.
    """

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = urlsplit(endpoint).netloc.rpartition("@")[2]  # without a password
        self._fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See `SpanExporter`; called by one thread."""
        result = self._exporter.export(spans)
        fails = result is not SpanExportResult.SUCCESS
        if fails and not self._fails:
            _log.warning(
                "traces do not reach %s, and are lost; is a collector of OTLP over HTTP there?",
                self._endpoint,
            )
        elif self._fails and not fails:
            _log.warning("traces reach %s again", self._endpoint)
        self._fails = fails
        return result

    def shutdown(self) -> None:
        """See `SpanExporter`."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """See `SpanExporter`."""
        return self._exporter.force_flush(timeout_millis)
