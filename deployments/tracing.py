"""OpenTelemetry traces with GenAI names: a span per request, with waiting, prefill and decoding as children.

Spans are made when a request has ended, from the times in its receipt, and exported by a thread.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from cluster.observability_config import TelemetryConfig
from deployments.openai_responses import ChatFormat
from deployments.request_log import EndedRequest, listen

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

_NAMES = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "request_id": "flotilla.request_id",
    "tier": "flotilla.tier",
    "tier_served": "flotilla.tier_served",
    "slo_met": "flotilla.slo.attained",
    "verified_tokens": "flotilla.verified_tokens",
    "accepted_tokens": "flotilla.accepted_tokens",
    "preemptions": "flotilla.preemptions",
}


#: For a process that ends, which a collector that does not answer is not to hold up.
_CLOSE_S = 3.0


class MissingTelemetry(RuntimeError):
    """Traces are asked for and the packages that make them are not installed."""


def trace_requests(config: TelemetryConfig, front_end: str) -> RequestTracer | None:
    """Trace every request that ends in this process; None where that is off. Raises `MissingTelemetry`."""
    if config.otlp_endpoint is None:
        return None
    # Not at the top of the file: whoever traces nothing need not have them, nor wait for them.
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from deployments.span_exporter import ToldExporter
    except ImportError as error:
        raise MissingTelemetry(
            "`telemetry.otlp_endpoint` is set, but OpenTelemetry is not installed: "
            "install the extra `otel` (`pip install -e '.[otel]'` in the repository), or unset it"
        ) from error
    endpoint = config.otlp_endpoint.rstrip("/")
    endpoint = endpoint if endpoint.endswith("/v1/traces") else f"{endpoint}/v1/traces"
    exporter = ToldExporter(OTLPSpanExporter(endpoint=endpoint), endpoint)
    tracer = RequestTracer(config, front_end, BatchSpanProcessor(exporter))
    listen(tracer.ended)
    return tracer


class RequestTracer:
    """Makes the spans of ended requests.

    Args:
        config: names and sampling.
        front_end: id of this process.
        processor: takes the spans.
    """

    def __init__(self, config: TelemetryConfig, front_end: str, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        resource = Resource.create(
            {"service.name": config.service_name, "service.instance.id": front_end or "front end"}
        )
        sampler = ParentBased(TraceIdRatioBased(config.sample_ratio))
        self._provider: TracerProvider = TracerProvider(resource=resource, sampler=sampler)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("flotilla")

    def ended(self, request: EndedRequest) -> None:
        """A request ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        call = request.call
        parent = TraceContextTextMapPropagator().extract(dict(request.headers))
        operation = "chat" if isinstance(call.shape, ChatFormat) else "text_completion"
        model = call.shape.envelope.model
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(request.started),
            attributes={"gen_ai.operation.name": operation, **_attributes(request, model)},
        )
        if request.status not in ("ok", "cancelled"):
            span.set_status(Status(StatusCode.ERROR, request.status))
            span.set_attribute("error.type", request.status)
        within = set_span_in_context(span, parent)
        for name, start_s, end_s in _phases(request):
            start, end = _nanoseconds(request.started + start_s), _nanoseconds(request.started + end_s)
            child = self._tracer.start_span(f"flotilla.{name}", context=within, start_time=start)
            child.end(end)
        span.end(_nanoseconds(request.started + request.seconds))

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()

    async def leave(self, within_s: float = _CLOSE_S) -> None:
        """Export what is left, as far as the collector takes it in time."""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self.close), within_s)


def _attributes(request: EndedRequest, model: str) -> dict[str, Any]:
    summary = request.summary()
    attributes: dict[str, Any] = {
        "gen_ai.system": "flotilla",
        "gen_ai.provider.name": "flotilla",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        **{name: summary[key] for key, name in _NAMES.items() if summary.get(key) is not None},
        "flotilla.drafters": sorted(summary.get("drafters", {})),
    }
    # After a downgrade those of the lower tier: what was attained is of them.
    call = request.call
    targets = call.receipt()["slo"] if call.outcomes else msgspec.structs.asdict(call.terms.objective)
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        wanted, got = targets[name], summary.get(name)
        if wanted is not None:
            attributes[f"flotilla.slo.{name}"] = wanted
        if got is not None:
            attributes[f"flotilla.{name}"] = got
    return attributes


def _phases(request: EndedRequest) -> list[tuple[str, float, float]]:
    """Queue, prefill and decode of the first choice: name, begin and end in seconds since the start."""
    first = request.call.outcomes.get(0)
    if first is None or first.receipt is None or first.ttft_ms is None:
        return []
    queue_s, first_s = first.receipt.queue_ms / 1e3, first.ttft_ms / 1e3
    end_s = max(first_s, first.e2e_ms / 1e3)
    queue_s = min(queue_s, first_s)
    return [("queue", 0.0, queue_s), ("prefill", queue_s, first_s), ("decode", first_s, end_s)]


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
