"""Long bodies are checked in a thread, so that streams of other requests go on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from pydantic import BaseModel

from deployments import grpc_retries
from deployments.api_service import ApiService
from deployments.grpc_retries import KeyedCalls
from deployments.grpc_service import GenerationService
from deployments.idempotency import find_key
from deployments.openai_api import create_app
from deployments.prompt_preparation import INLINE_BYTES
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.request_model import RequestModel
from tests.fakes.cell_stand_in import CellStandIn


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[threading.Thread]:
    """Threads in which bodies were checked."""
    found = set()

    def model_validate(cls: type[BaseModel], *args: Any, **kwargs: Any) -> Any:
        found.add(threading.current_thread())
        return BaseModel.model_validate.__func__(cls, *args, **kwargs)

    monkeypatch.setattr(RequestModel, "model_validate", classmethod(model_validate))
    return found


@pytest.fixture
async def client(service: ApiService) -> AsyncIterator[httpx.AsyncClient]:
    """Of an app with the server's own limit for bodies."""
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://cell") as made:
        yield made


def parts(number: int) -> list[dict[str, str]]:
    return [{"type": "text", "text": "a"}] * number


BODIES = pytest.mark.parametrize(
    ("path", "body", "field", "item"),
    [
        ("/v1/completions", {"max_tokens": 1}, "prompt", 5),
        ("/v1/chat/completions", {}, "messages", {"role": "user", "content": parts(4)}),
        ("/v1/responses", {}, "input", {"role": "user", "content": "a"}),
        ("/v1/responses/input_tokens", {}, "input", {"role": "user", "content": "a"}),
        ("/v1/messages", {"max_tokens": 1}, "messages", {"role": "user", "content": parts(4)}),
        ("/v1/messages/count_tokens", {}, "messages", {"role": "user", "content": parts(4)}),
        ("/tokenize", {}, "messages", {"role": "user", "content": parts(4)}),
        ("/detokenize", {}, "tokens", 5),
    ],
)


@BODIES
async def test_only_a_long_body_is_checked_in_a_thread(
    client: httpx.AsyncClient,
    cell: CellStandIn,
    threads: set[threading.Thread],
    path: str,
    body: dict[str, Any],
    field: str,
    item: object,
) -> None:
    cell.max_tokens = 1 << 20
    short = await client.post(path, json={**body, field: [item] * 2})
    assert short.status_code == 200, short.text
    assert threads == {threading.current_thread()}
    threads.clear()
    number = INLINE_BYTES // len(msgspec.json.encode(item)) + 1
    answer = await client.post(path, json={**body, field: [item] * number})
    assert answer.status_code == 200, answer.text
    assert threads
    assert threading.current_thread() not in threads
    wrong = await client.post(path, json={**body, field: [item] * number, "model": 7})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_so_it_is_over_grpc(
    service: ApiService, cell: CellStandIn, threads: set[threading.Thread]
) -> None:
    cell.max_tokens = 1 << 20
    calls = GenerationService(service)
    for number, is_here in ((2, True), (INLINE_BYTES, False)):
        threads.clear()
        await calls.generate(pb.GenerateRequest(prompt_token_ids=[5] * number, max_tokens=1), {})
        assert (threads == {threading.current_thread()}) is is_here


@pytest.mark.parametrize("number", [3, INLINE_BYTES])
async def test_what_a_key_over_grpc_is_of_is_written_out_likewise(
    service: ApiService, cell: CellStandIn, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A message of four megabytes took a tenth of a second, as did all that came with an `x-request-id`."""
    cell.max_tokens = 1 << 20
    found: list[threading.Thread] = []

    def noted(*args: Any) -> Any:
        found.append(threading.current_thread())
        return find_key(*args)

    monkeypatch.setattr(grpc_retries, "find_key", noted)
    keyed = KeyedCalls()
    grpc = GenerationService(service, keyed=keyed)
    request = pb.GenerateRequest(prompt_token_ids=[5] * number, max_tokens=1)
    await grpc.generate(request, {"idempotency-key": "one"})
    assert [chunk async for chunk in grpc.generate_stream(request, {"idempotency-key": "other"})]
    await keyed.close()
    assert len(found) == 2
    assert (threading.current_thread() in found) == (number < INLINE_BYTES)
