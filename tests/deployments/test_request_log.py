"""What is logged and traced of requests, and what is not."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import ValidationError

from cluster.logs import PACKAGES, configure_logs
from cluster.observability_config import LogConfig, TelemetryConfig
from cluster.security_config import SecurityConfig
from cluster.stream_messages import Objective, Rejected, Terms
from deployments import request_log
from deployments.api_keys import hash_key
from deployments.api_service import ApiService
from deployments.authentication import Authenticator
from deployments.errors import ApiError
from deployments.front_end_metrics import FrontEndMetrics
from deployments.grpc_service import GenerationService
from deployments.openai_api import create_app
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.request_log import log_fields
from deployments.span_exporter import ToldExporter
from deployments.tracing import RequestTracer, trace_requests
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import ANSWER

SECRET_PROMPT = "the launch code is quokka"


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    """Ours as JSON lines in a file; everything as before afterwards."""
    loggers = [logging.getLogger(name) for name in PACKAGES]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    path = tmp_path / "log" / "flotilla.jsonl"
    handler = configure_logs(LogConfig(format="json", file=path), {"front_end": "fe-1"}, log_fields)
    yield path
    handler.close()
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.level, logger.propagate = handlers, level, propagate


async def test_one_line_per_request_without_its_text(http: httpx.AsyncClient, log_file: Path) -> None:
    body = {"prompt": SECRET_PROMPT, "max_tokens": 8, "service_tier": "fast", "user": "quokka-user"}
    headers = {"X-Request-Id": "abc-1", "Authorization": "Bearer quokka-key"}
    answer = await http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    text = answer.json()["choices"][0]["text"]
    streamed = await http.post("/v1/completions", json={**body, "stream": True}, headers=headers)
    assert streamed.status_code == 200
    lines = [json.loads(line) for line in log_file.read_text().splitlines()]
    told = [line for line in lines if line["message"] == "request"]
    assert len(told) == 2
    for line in told:
        assert line["level"] == "info"
        assert (line["front_end"], line["request_id"], line["tier"]) == ("fe-1", "abc-1", "fast")
        assert (line["status"], line["prompt_tokens"]) == ("ok", answer.json()["usage"]["prompt_tokens"])
        assert line["ttft_ms"] == 5.0
        assert line["slo_met"] is True
        assert line["drafters"] == {"small": 6, "lookup": 2}
    whole = log_file.read_text()
    assert "quokka" not in whole
    assert text.strip() not in whole
    assert ANSWER[:10] not in whole


async def test_failures_are_told_with_their_code(
    http: httpx.AsyncClient, cell: CellStandIn, log_file: Path
) -> None:
    cell.reject = Rejected(request_id="", code="queue_full", message="9 are waiting", retry_after_s=1.0)
    refused = await http.post("/v1/completions", json={"prompt": SECRET_PROMPT, "temperature": 0})
    assert refused.status_code == 429
    bad = await http.post("/v1/completions", json={"prompt": SECRET_PROMPT, "temperature": "quokka"})
    assert bad.status_code == 400
    line, bad_line = [json.loads(line) for line in log_file.read_text().splitlines()]
    assert line["status"] == refused.json()["error"]["code"]
    assert "prompt_tokens" not in line
    assert (bad_line["message"], bad_line["code"]) == ("refused", "invalid_type")
    assert "quokka" not in log_file.read_text()


async def test_a_refused_request_is_found_by_its_id_with_the_field_at_fault(
    service: ApiService, log_file: Path
) -> None:
    """Of hundreds, when clients began to send a field that is not known here, nothing was to be found."""
    keys = log_file.with_name("keys.yaml")
    keys.write_text(f"keys: [{{name: team, hash: '{hash_key('a-key-that-is-long-enough')}'}}]")
    metrics = FrontEndMetrics("fe-1")
    authenticator = Authenticator(SecurityConfig(keys_file=keys), environment={})
    app = create_app(service, metrics=metrics, authenticator=authenticator)
    known = {"Authorization": "Bearer a-key-that-is-long-enough"}
    body = {"prompt": SECRET_PROMPT, "max_tokens": 2}
    path = "/v1/completions"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://cell") as http:
        for status, name, headers, sent in (
            (400, "unknown", known, {**body, "quality": 3}),
            (400, "a-text", known, {**body, SECRET_PROMPT: 1}),
            (401, "no-key", {}, body),
            (415, "no-json", {**known, "Content-Type": "text/plain"}, body),
            (200, "fine", known, body),
        ):
            answer = await http.post(path, json=sent, headers={**headers, "X-Request-Id": name})
            assert answer.status_code == status, answer.text
        assert (await http.get("/nowhere", headers={**known, "X-Request-Id": "lost"})).status_code == 404
    lines = [json.loads(line) for line in log_file.read_text().splitlines()]
    assert [
        (line["request_id"], line["code"], line.get("param"), line["status"], line["route"], line.get("key"))
        for line in lines
        if line["message"] == "refused"
    ] == [
        ("unknown", "unknown_parameter", "quality", 400, path, "team"),
        ("a-text", "unknown_parameter", "(no name of a field)", 400, path, "team"),
        ("no-key", "invalid_api_key", None, 401, path, None),
        ("no-json", "not_json", None, 415, path, "team"),
        ("lost", "not_found", None, 404, "unknown", "team"),
    ]
    assert "quokka" not in log_file.read_text()
    counted = {
        line.partition(" ")[0].partition('code="')[2].partition('"')[0]: line.rpartition(" ")[2]
        for line in metrics.render().splitlines()
        if line.startswith('flotilla_request_errors_total{api="http"') and not line.endswith(" 0.0")
    }
    assert counted == {
        "unknown_parameter": "2.0", "invalid_api_key": "1.0", "not_json": "1.0", "not_found": "1.0",
    }  # fmt: skip


async def test_probes_of_what_is_not_ready_fill_no_log(
    http: httpx.AsyncClient, cell: CellStandIn, log_file: Path
) -> None:
    cell.ready = False
    for path in ("/ready", "/ping"):
        assert (await http.get(path)).status_code == 503
    assert log_file.read_text() == ""


async def test_a_refused_call_over_grpc_is_found_likewise(service: ApiService, log_file: Path) -> None:
    metrics = FrontEndMetrics("fe-1")
    grpc = GenerationService(service, metrics)
    with pytest.raises(ApiError):
        await grpc.generate(pb.GenerateRequest(prompt=SECRET_PROMPT, request_id="g-1", n=99), {})
    with pytest.raises(ApiError):
        await grpc.cancel(pb.CancelRequest(), {"x-request-id": "g-2"})
    lines = [json.loads(line) for line in log_file.read_text().splitlines()]
    told = [(line["message"], line["request_id"], line["method"], line["param"]) for line in lines]
    assert told == [("refused", "g-1", "Generate", "n"), ("refused", "g-2", "Cancel", "request_id")]
    assert 'flotilla_request_errors_total{api="grpc",code="invalid_value",front_end="fe-1"} 2.0' in (
        metrics.render()
    )
    assert "quokka" not in log_file.read_text()


async def test_a_client_that_leaves_is_told_of(url: str, cell: CellStandIn, log_file: Path) -> None:
    cell.pause_s = 0.05
    async with httpx.AsyncClient() as client:
        body = {"prompt": "x", "stream": True, "ignore_eos": True}
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            await anext(answer.aiter_lines())
    for _ in range(100):
        if log_file.read_text():
            break
        await asyncio.sleep(0.02)
    assert json.loads(log_file.read_text())["status"] == "cancelled"


def test_text_lines_carry_the_same_fields(tmp_path: Path) -> None:
    before = logging.getLogger("cluster").handlers, logging.getLogger("cluster").propagate
    handler = configure_logs(LogConfig(file=tmp_path / "x"), {"cell": "c-1"})
    try:
        record = logging.makeLogRecord({"name": "cluster.x", "msg": "two\nlines", "levelname": "WARNING"})
        record.fields = {"request_id": "r"}
        assert handler.format(record).endswith("warning cluster.x: two\nlines cell=c-1 request_id=r")
    finally:
        handler.close()
        for name in PACKAGES:
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = before
            logger.setLevel(logging.NOTSET)


@pytest.fixture
async def collector() -> AsyncIterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """An OTLP/HTTP collector: its address and what it received."""
    received: list[ExportTraceServiceRequest] = []

    async def take(request: web.Request) -> web.Response:
        received.append(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield f"http://127.0.0.1:{port}", received
    await runner.cleanup()


@pytest.fixture
def listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "_listeners", [])


@pytest.mark.usefixtures("listeners")
async def test_a_request_is_a_trace_at_a_real_collector(
    http: httpx.AsyncClient, collector: tuple[str, list[ExportTraceServiceRequest]]
) -> None:
    endpoint, received = collector
    tracer = trace_requests(TelemetryConfig(otlp_endpoint=endpoint, service_name="cove"), "fe-1")
    assert isinstance(tracer, RequestTracer)
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    answer = await http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": SECRET_PROMPT}], "slo": {"tpot_ms": 1}},
        headers={"traceparent": f"00-{trace_id}-{parent_id}-01"},
    )
    assert answer.status_code == 200
    await tracer.leave()
    (request,) = received
    assert b"quokka" not in request.SerializeToString()
    (resource,) = request.resource_spans
    assert any(
        one.key == "service.name" and one.value.string_value == "cove" for one in resource.resource.attributes
    )
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    top = spans["chat demo"]
    assert set(spans) == {"chat demo", "flotilla.queue", "flotilla.prefill", "flotilla.decode"}
    assert {span.trace_id.hex() for span in spans.values()} == {trace_id}
    assert top.parent_span_id.hex() == parent_id
    attributes = {one.key: one.value for one in top.attributes}
    usage = answer.json()["usage"]
    assert attributes["gen_ai.request.model"].string_value == "demo"
    assert attributes["gen_ai.usage.input_tokens"].int_value == usage["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"].int_value == usage["completion_tokens"]
    assert [v.string_value for v in attributes["gen_ai.response.finish_reasons"].array_value.values] == [
        "stop"
    ]
    assert attributes["flotilla.slo.attained"].bool_value is False
    assert attributes["flotilla.slo.tpot_ms"].double_value == 1.0
    children = [spans[f"flotilla.{name}"] for name in ("queue", "prefill", "decode")]
    assert all(child.parent_span_id == top.span_id for child in children)
    metrics = answer.json()["metrics"]
    lengths_ms = [(child.end_time_unix_nano - child.start_time_unix_nano) / 1e6 for child in children]
    first_ms, end_ms = metrics["time_to_first_token_ms"], metrics["e2e_ms"]
    assert lengths_ms == pytest.approx([1.0, first_ms - 1.0, end_ms - first_ms], abs=1e-2)
    assert children[0].end_time_unix_nano == children[1].start_time_unix_nano


@pytest.mark.usefixtures("listeners")
async def test_after_a_downgrade_the_objectives_told_are_those_that_were_attained(
    http: httpx.AsyncClient,
    cell: CellStandIn,
    collector: tuple[str, list[ExportTraceServiceRequest]],
    log_file: Path,
) -> None:
    """A span had the objective asked for, 1 ms, a latency of 1,123 ms, and that it was attained."""
    endpoint, received = collector
    tracer = trace_requests(TelemetryConfig(otlp_endpoint=endpoint), "fe-1")
    assert tracer is not None
    cell.terms = Terms(tier="bulk", objective=Objective(e2e_ms=60_000.0), priority=1)
    body = {"prompt": "x", "max_tokens": 4, "service_tier": "fast"}
    answer = await http.post("/v1/completions", json=body)
    assert answer.json()["metrics"]["tier"]["served"] == "bulk"
    await tracer.leave(10.0)
    (exported,) = received
    (top,) = [one for one in exported.resource_spans[0].scope_spans[0].spans if "completion" in one.name]
    attributes = {one.key: one.value for one in top.attributes}
    assert attributes["flotilla.slo.attained"].bool_value is True
    assert attributes["flotilla.slo.e2e_ms"].double_value == 60_000.0
    assert "flotilla.slo.tpot_ms" not in attributes
    assert attributes["flotilla.tier"].string_value == "fast"
    assert attributes["flotilla.tier_served"].string_value == "bulk"
    (line,) = [json.loads(line) for line in log_file.read_text().splitlines()]
    assert (line["tier"], line["tier_served"], line["slo_met"]) == ("fast", "bulk", True)


@pytest.mark.usefixtures("listeners")
async def test_calls_over_grpc_join_the_trace_of_who_calls(
    service: ApiService, collector: tuple[str, list[ExportTraceServiceRequest]], log_file: Path
) -> None:
    endpoint, received = collector
    tracer = trace_requests(TelemetryConfig(otlp_endpoint=endpoint), "fe-1")
    assert tracer is not None
    keys = log_file.with_name("keys.yaml")
    keys.write_text(f"keys: [{{name: team, hash: '{hash_key('a-key-that-is-long-enough')}'}}]")
    authenticator = Authenticator(SecurityConfig(keys_file=keys), environment={})
    grpc = GenerationService(service, authenticator=authenticator)
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    metadata = {
        "authorization": "Bearer a-key-that-is-long-enough",
        "traceparent": f"00-{trace_id}-{parent_id}-01",
    }
    request = pb.GenerateRequest(prompt="x", max_tokens=4)
    await grpc.generate(request, metadata)
    assert [chunk async for chunk in grpc.generate_stream(request, metadata)]
    # As a front end that ends does: what it holds would be sent seconds later only.
    await tracer.leave(10.0)
    (exported,) = received
    spans = [span for scope in exported.resource_spans[0].scope_spans for span in scope.spans]
    assert {span.trace_id.hex() for span in spans} == {trace_id}
    tops = [span.parent_span_id.hex() for span in spans if not span.name.startswith("flotilla.")]
    assert tops == [parent_id, parent_id]
    lines = [json.loads(line) for line in log_file.read_text().splitlines()]
    assert [(line["message"], line["key"]) for line in lines] == [("request", "team")] * 2


async def test_a_front_end_that_ends_exports_what_is_left_but_waits_for_no_collector() -> None:
    """It exported nothing: Ray ends the process, and what had ended in its last five seconds was lost."""
    released = threading.Event()

    class Collecting(SpanProcessor):
        def shutdown(self) -> None:
            released.wait(10.0)

    tracer = RequestTracer(TelemetryConfig(), "fe-1", Collecting())
    began = time.monotonic()
    await tracer.leave(within_s=0.05)
    assert time.monotonic() - began < 5.0
    released.set()


def test_the_log_says_when_traces_begin_to_fail_and_when_they_come_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A wrong endpoint was told in a file of Ray's alone."""

    class Collecting(InMemorySpanExporter):
        takes = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return SpanExportResult.SUCCESS if self.takes else SpanExportResult.FAILURE

    collecting = Collecting()
    exporter = ToldExporter(collecting, "http://me:secret@collector:4317/v1/traces")
    with caplog.at_level(logging.WARNING):
        for takes in (False, False, True, True, False):
            collecting.takes = takes
            exporter.export([])
    told = [record.message.split(",")[0] for record in caplog.records]
    failing = "traces do not reach collector:4317"
    assert told == [failing, "traces reach collector:4317 again", failing]


def test_without_traces_opentelemetry_is_not_even_imported() -> None:
    assert trace_requests(TelemetryConfig(), "fe-1") is None
    code = (
        "import deployments.tracing, sys; sys.exit(any(m.startswith('opentelemetry') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_grpc_calls_are_counted() -> None:
    metrics = FrontEndMetrics("fe-1")
    with metrics.grpc_call("Generate"):
        assert 'flotilla_grpc_calls_open{front_end="fe-1"} 1.0' in metrics.render()
    with metrics.grpc_call("Generate") as ends_with:
        ends_with("CANCELLED")
    with pytest.raises(KeyError), metrics.grpc_call("Generate"):
        raise KeyError
    text = metrics.render()
    for code in ("OK", "CANCELLED", "UNKNOWN"):
        line = f'flotilla_grpc_calls_total{{code="{code}",front_end="fe-1",method="Generate"}} 1.0'
        assert line in text
    assert 'flotilla_grpc_calls_open{front_end="fe-1"} 0.0' in text


def test_an_endpoint_without_a_scheme_is_refused() -> None:
    """As gRPC exporters are given it: no span could be sent, and only a front end's log would say so."""
    with pytest.raises(ValidationError, match="https"):
        TelemetryConfig(otlp_endpoint="localhost:4317")
