"""What is counted and logged of calls over gRPC, whatever they end with."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.grpc_config import GrpcConfig
from cluster.security_config import SecurityConfig
from deployments import grpc_mapping
from deployments.api_keys import hash_key
from deployments.api_service import ApiService
from deployments.authentication import Authenticator
from deployments.errors import ApiError
from deployments.front_end_metrics import FrontEndMetrics
from deployments.grpc_server import make_server
from deployments.grpc_service import GenerationService
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.proto.flotilla.v1 import generation_pb2_grpc as pb_grpc
from deployments.request_log import log_fields
from tests.fakes.cell_stand_in import CellStandIn, eventually

KEY = "a-key-that-is-long-enough"


@pytest.mark.parametrize("timeout_s", [0.1, 1.011])
async def test_a_deadline_of_the_clients_own_is_counted_as_that(
    cell: CellStandIn, service: ApiService, free_port: int, timeout_s: float
) -> None:
    """It counted as a call that the client had given up."""
    cell.starved = True
    metrics = FrontEndMetrics("one")
    server = make_server(GrpcConfig(enabled=True, port=free_port), service, metrics)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
        stub: Any = pb_grpc.GenerationStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Generate(pb.GenerateRequest(prompt="hi"), timeout=timeout_s)
        assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: len(cell.cancels) == 1)
    await server.stop(None)
    assert 'calls_total{code="DEADLINE_EXCEEDED",front_end="one",method="Generate"} 1.0' in metrics.render()


async def test_a_bug_anywhere_is_logged_counted_and_kept_from_the_client(
    service: ApiService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once an answer was generated gRPC itself told the client what was wrong inside, and not our log."""

    def bug(_: object) -> pb.Usage:
        raise RuntimeError("wrong inside")

    monkeypatch.setattr(grpc_mapping, "usage", bug)
    metrics = FrontEndMetrics("one")
    calls = GenerationService(service, metrics)
    request = pb.GenerateRequest(prompt="hi", request_id="b-1")
    with pytest.raises(ApiError) as failed:
        await calls.generate(request, {})
    assert (failed.value.status, "b-1" in failed.value.message) == (500, True)
    with pytest.raises(ApiError) as failed:
        assert [chunk async for chunk in calls.generate_stream(request, {})]
    assert "inside" not in failed.value.message
    logged = [record for record in caplog.records if record.getMessage() == "request b-1 failed"]
    assert ["wrong inside" in str(record.exc_info) for record in logged] == [True, True]
    counted = metrics.render()
    assert 'errors_total{api="grpc",code="internal_error",front_end="one"} 2.0' in counted
    for method in ("Generate", "GenerateStream"):
        assert f'calls_total{{code="INTERNAL",front_end="one",method="{method}"}} 1.0' in counted


async def test_what_is_logged_meanwhile_names_the_request(
    service: ApiService,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of a warning about a call over gRPC nobody could tell which it was, or whose."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{name: team, hash: '{hash_key(KEY)}'}}]")
    authenticator = Authenticator(SecurityConfig(keys_file=keys), environment={})
    fields: list[dict[str, Any]] = []
    monkeypatch.setattr(
        logging.getLogger("deployments.request_log"), "info", lambda *_, **__: fields.append(log_fields())
    )
    caplog.set_level("INFO", "deployments.request_log")
    calls = GenerationService(service, authenticator=authenticator)
    metadata = {"x-api-key": KEY, "x-request-id": "m-1"}
    request = pb.GenerateRequest(prompt="hi", service_tier="fast")
    await calls.generate(request, metadata)
    request.request_id = "m-2"
    assert [chunk async for chunk in calls.generate_stream(request, metadata)]
    assert fields == [{"request_id": name, "tier": "fast", "key": "team"} for name in ("m-1", "m-2")]
    assert log_fields() == {}
