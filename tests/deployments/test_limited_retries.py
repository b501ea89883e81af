"""Requests sent again with their key while the key to the API has no further place: the answer holds one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
import yaml

from cluster.grpc_config import GrpcConfig
from cluster.security_config import SecurityConfig
from deployments.api_keys import hash_key, new_key
from deployments.api_service import ApiService
from deployments.authentication import Authenticator
from deployments.grpc_server import make_server
from deployments.openai_api import create_app
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.proto.flotilla.v1 import generation_pb2_grpc as pb_grpc
from tests.deployments.socket_server import served
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import ANSWER

KEY = new_key()
BODY = {"prompt": "hi", "max_tokens": 100, "stream": True}
PATH = "/v1/completions"


@pytest.fixture
def authenticator(tmp_path: Any) -> Authenticator:
    limits = {"max_concurrent": 1, "requests_per_minute": 4}
    keys = [{"name": "one", "hash": hash_key(KEY), "limits": limits}]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": keys}))
    config = SecurityConfig(keys_file=tmp_path / "keys.yaml")
    return Authenticator(config, environment={}, clock=lambda: 100.0)


@pytest.fixture(autouse=True)
def slow(cell: CellStandIn) -> None:
    cell.per_step, cell.pause_s = 1, 0.1


@pytest.fixture
async def http(service: ApiService, authenticator: Authenticator) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(service, authenticator=authenticator)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with served(app) as url, httpx.AsyncClient(base_url=url, headers=headers) as client:
        yield client


async def test_over_http(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    first = ""
    async with http.stream("POST", PATH, json=BODY, headers={"Idempotency-Key": "k"}) as response:
        async for line in response.aiter_lines():
            first += f"{line}\n"
            if line == "id: 3":
                break
    await asyncio.sleep(0.05)
    for path, headers in (
        (PATH, {}),
        (PATH, {"Idempotency-Key": "l"}),
        ("/tokenize", {"Idempotency-Key": "k"}),
    ):
        refused = await http.post(path, json=BODY, headers=headers)
        assert refused.status_code == 429, refused.text
        assert "1 requests at once" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        assert len(refused.headers.get_list("x-ratelimit-limit-requests")) == 1
    cell.pause_s = 0.0
    retry = await http.post(PATH, json=BODY, headers={"Idempotency-Key": "k", "Last-Event-ID": "2"})
    assert retry.status_code == 200, retry.text
    assert retry.headers["idempotent-replayed"] == "true"
    assert retry.text.startswith("id: 3\n")
    assert retry.text.rstrip().endswith("data: [DONE]")
    assert len(cell.submissions) == 1
    # It was one request more: with the first and the one of another key there were three of four.
    assert retry.headers["x-ratelimit-remaining-requests"] == "1"
    assert (await http.post(PATH, json=BODY)).status_code == 200
    spent = await http.post(PATH, json=BODY, headers={"Idempotency-Key": "k"})
    assert (spent.status_code, "4 requests per minute" in spent.text) == (429, True)


async def test_over_grpc(
    service: ApiService, authenticator: Authenticator, free_port: int, cell: CellStandIn
) -> None:
    server = make_server(GrpcConfig(enabled=True, port=free_port), service, authenticator=authenticator)
    await server.start()
    request = pb.GenerateRequest(prompt="hi", max_tokens=100)

    def metadata(key: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {KEY}"), ("idempotency-key", key))

    async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
        stub: Any = pb_grpc.GenerationStub(channel)
        call = stub.GenerateStream(request, metadata=metadata("k"))
        await call.read()
        call.cancel()
        await asyncio.sleep(0.05)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(request, metadata=metadata("l"))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        cell.pause_s = 0.0
        chunks = [chunk async for chunk in stub.GenerateStream(request, metadata=metadata("k"))]
        assert "".join(chunk.choice.text for chunk in chunks) == ANSWER
    assert len(cell.submissions) == 1
    await server.stop(None)
