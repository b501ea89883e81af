"""Requests with and without keys, over HTTP and gRPC: who is let in, to what, and how much of it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import openai
import pytest
import yaml
from fastapi import FastAPI
from starlette.routing import Route

from cluster.grpc_config import GrpcConfig
from cluster.security_config import KeyConfig, KeyLimits, Permission, SecurityConfig
from cluster.stream_messages import NOBODY, Rejected
from deployments.api_keys import hash_key, new_key
from deployments.api_service import ApiService
from deployments.authentication import Authenticator
from deployments.errors import ApiError
from deployments.grpc_mapping import RETRY_KEY
from deployments.grpc_server import make_server
from deployments.key_gate import permission_for
from deployments.openai_api import create_app
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.proto.flotilla.v1 import generation_pb2_grpc as pb_grpc
from tests.fakes.cell_stand_in import CellStandIn, eventually
from tests.fakes.tiny_tokenizer import ANSWER, ids

BODY = {"prompt": "hi", "max_tokens": 30}
KEYS = {
    name: new_key()
    for name in (
        *("plain", "fast", "all", "metrics", "requests", "tokens", "one", "other"),
        *("terse", "target", "nothing"),
    )
}
NUM_PROMPT = len(ids("hi")) + 1  # the tokenizer adds its own


@functools.cache
def keys_in_yaml() -> str:
    kinds: dict[str, dict[str, Any]] = {
        "fast": {"tiers": ["fast"]},
        "all": {"permissions": ["api", "metrics", "debug", "admin"]},
        "metrics": {"permissions": ["metrics"]},
        "requests": {"limits": {"requests_per_minute": 2}},
        "tokens": {"limits": {"tokens_per_minute": 200}},
        "one": {"limits": {"max_concurrent": 1}},
        "terse": {"models": ["terse", "unserved"]},
        "target": {"models": ["demo"]},
        "nothing": {"models": []},
    }
    keys = [{"name": name, "hash": hash_key(key), **kinds.get(name, {})} for name, key in KEYS.items()]
    return yaml.safe_dump({"keys": keys})


def key_file(path: Any) -> SecurityConfig:
    path.write_text(keys_in_yaml())
    return SecurityConfig(keys_file=path)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def authenticator(tmp_path: Any, clock: Clock) -> Authenticator:
    return Authenticator(key_file(tmp_path / "keys.yaml"), max_open=3, environment={}, clock=clock)


@pytest.fixture
def app(service: ApiService, authenticator: Authenticator) -> FastAPI:
    return create_app(service, max_body_bytes=20_000, authenticator=authenticator)


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


def paths(app: FastAPI) -> Iterator[tuple[str, str]]:
    for route in app.routes:
        if isinstance(route, Route):
            path = route.path.replace("{model_id:path}", "demo").replace("{kind}", "x")
            for method in sorted(route.methods or ()):
                yield method, path.replace("{name:path}", "x")


async def test_every_route_but_the_named_ones_needs_a_key(app: FastAPI, http: httpx.AsyncClient) -> None:
    is_open = set()
    for method, path in paths(app):
        answer = await http.request(method, path)
        if answer.status_code != 401:
            is_open.add(path)
    probes = {"/health", "/ready", "/ping"}
    assert probes <= is_open
    assert all(path in probes or path.startswith("/console") for path in is_open), is_open
    assert "/console/state" not in is_open
    assert (await http.get("/nowhere")).status_code == 401


async def test_the_answer_is_the_same_whatever_is_wrong(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    right = KEYS["plain"]
    wrong = [
        None, "", "Bearer", "Bearer ", f"Bearer {right[:-1]}", f"Bearer {right}x", f"Basic {right}", right,
        f"Bearer {new_key()}", "Bearer \xff\xfe", f"Bearer {right} {right}",
    ]  # fmt: skip
    bodies = set()
    for header in wrong:
        headers = [] if header is None else [(b"authorization", header.encode("latin-1"))]
        answer = await http.post("/v1/completions", json=BODY, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.headers["x-request-id"]
        bodies.add(answer.text)
    twice = [(b"authorization", f"Bearer {right}".encode())] * 2
    bodies.add((await http.post("/v1/completions", json=BODY, headers=twice)).text)
    assert len(bodies) == 1
    assert '"code":"invalid_api_key"' in bodies.pop()
    assert cell.submissions == []
    assert (await http.post("/v1/completions", json=BODY, headers=bearer("plain"))).status_code == 200
    lower = {"authorization": f"bearer {right}"}
    assert (await http.post("/v1/completions", json=BODY, headers=lower)).status_code == 200


@pytest.mark.parametrize(
    ("path", "permission"),
    [
        ("/metrics", "metrics"), ("/metrics/targets", "metrics"), ("/metricsx", "api"), ("/debug/x", "debug"),
        ("/admin/drafters", "admin"), ("/v1/models", "api"), ("/health", None), ("/health/", "api"),
        ("/console", None), ("/console/app.js", None), ("/console/state", "api"), ("//health", "api"),
        ("/openapi.json", "api"), ("/v1/x.js", "api"), ("/", "api"),
    ],
)  # fmt: skip
def test_what_paths_need(path: str, permission: Permission | None) -> None:
    assert permission_for(path) == permission


async def test_keys_open_what_they_are_for(http: httpx.AsyncClient) -> None:
    expected = {
        ("plain", "/v1/models"): 200, ("plain", "/metrics"): 403, ("plain", "/debug/timeline"): 403,
        ("plain", "/admin/drafters"): 403, ("metrics", "/metrics"): 200, ("metrics", "/v1/models"): 403,
        ("all", "/metrics"): 200, ("all", "/admin/drafters"): 404,
    }  # fmt: skip
    for (name, path), status in expected.items():
        answer = await http.get(path, headers=bearer(name))
        assert answer.status_code == status, (name, path, answer.text)
        if status == 403:
            assert answer.json()["error"]["code"] == "permission_denied"


async def test_a_key_of_one_tier_serves_no_other(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    for tier, status in (("fast", 200), (None, 403), ("default", 403), ("auto", 403)):
        answer = await http.post(
            "/v1/completions", json=BODY | {"service_tier": tier}, headers=bearer("fast")
        )
        assert answer.status_code == status, answer.text
        if status == 403:
            error = answer.json()["error"]
            assert error["param"] == "service_tier"
            assert error["message"].endswith("Name one in `service_tier` that it does: fast.")
    assert len(cell.submissions) == 1


async def test_requests_per_minute(http: httpx.AsyncClient, clock: Clock) -> None:
    async def ask(name: str) -> httpx.Response:
        return await http.post("/v1/completions", json=BODY, headers=bearer(name))

    first, second, third = [await ask("requests") for _ in range(3)]
    assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert [one.headers["x-ratelimit-remaining-requests"] for one in (first, second, third)] == [
        "1",
        "0",
        "0",
    ]
    assert third.headers["retry-after"] == "30"
    assert third.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
    assert third.json()["error"]["code"] == "rate_limit_exceeded"
    assert third.json()["error"]["type"] == "rate_limit_error"
    # Nobody else notices, and reading costs nothing.
    assert (await ask("plain")).status_code == 200
    assert (await http.get("/v1/models", headers=bearer("requests"))).status_code == 200
    clock.now += 30.0
    assert (await ask("requests")).status_code == 200
    assert (await ask("requests")).status_code == 429


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_reserved_and_what_is_not_used_comes_back(
    http: httpx.AsyncClient, cell: CellStandIn, stream: bool
) -> None:
    async def ask(**fields: Any) -> httpx.Response:
        body = BODY | {"stream": stream} | fields
        return await http.post("/v1/completions", json=body, headers=bearer("tokens"))

    async def remaining() -> int:
        answer = await http.post("/tokenize", json={"prompt": "x"}, headers=bearer("tokens"))
        return int(answer.headers["x-ratelimit-remaining-tokens"])

    num_output = len(ids(ANSWER)) + 1
    first = await ask(max_tokens=150)
    assert first.status_code == 200
    if not stream:
        used = first.json()["usage"]
        assert used["total_tokens"] == NUM_PROMPT + num_output
    # Headers of a stream are sent before its end, so with all that was reserved.
    assert int(first.headers["x-ratelimit-remaining-tokens"]) <= 200 - NUM_PROMPT - num_output
    assert await remaining() == 200 - NUM_PROMPT - num_output
    refused = await ask(max_tokens=98, n=2)
    assert refused.status_code == 429
    assert "tokens per minute" in refused.json()["error"]["message"]
    assert await remaining() == 200 - NUM_PROMPT - num_output
    never = await ask(max_tokens=120, n=2)
    assert never.status_code == 400
    assert never.json()["error"]["code"] == "tokens_above_limit"
    cell.reject = Rejected(request_id="", code="queue_full", message="Too many wait.")
    assert (await ask()).status_code == 429
    assert await remaining() == 200 - NUM_PROMPT - num_output


async def test_what_is_open_is_limited_by_key_and_by_front_end(
    url: str, cell: CellStandIn, authenticator: Authenticator
) -> None:
    cell.starved = True
    async with httpx.AsyncClient(base_url=url) as client:

        async def ask(name: str) -> httpx.Response:
            return await client.post("/v1/completions", json=BODY, headers=bearer(name))

        waiting = [asyncio.create_task(ask("one"))]
        await eventually(lambda: len(cell.submissions) == 1)
        refused = await ask("one")
        assert refused.status_code == 429
        assert "1 requests at once" in refused.json()["error"]["message"]
        waiting += [asyncio.create_task(ask("plain")) for _ in range(2)]
        await eventually(lambda: len(cell.submissions) == 3)
        refused = await ask("other")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
        assert refused.headers["retry-after"] == "1"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        # Those who hang up are gone.
        await eventually(lambda: len(cell.cancels) == 3)
        cell.starved = False
        assert (await ask("one")).status_code == 200


async def test_the_official_client_understands(url: str) -> None:
    async def ask(key: str) -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            done = await client.completions.create(model="demo", prompt="hi", max_tokens=100)
            return done.choices[0].text

    assert await ask(KEYS["requests"]) == ANSWER
    await ask(KEYS["requests"])
    with pytest.raises(openai.RateLimitError, match="2 requests per minute"):
        await ask(KEYS["requests"])
    with pytest.raises(openai.AuthenticationError) as caught:
        await ask("none")
    assert caught.value.code == "invalid_api_key"
    with pytest.raises(openai.PermissionDeniedError, match="service tier 'default'"):
        await ask(KEYS["fast"])


@asynccontextmanager
async def grpc_stub(
    service: ApiService, authenticator: Authenticator, port: int
) -> AsyncIterator[pb_grpc.GenerationStub]:
    server = make_server(GrpcConfig(enabled=True, port=port), service, authenticator=authenticator)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.GenerationStub(channel)
    await server.stop(None)


async def test_the_same_keys_over_grpc(
    service: ApiService, authenticator: Authenticator, free_port: int, cell: CellStandIn
) -> None:
    request = pb.GenerateRequest(prompt="hi", max_tokens=100)

    def metadata(name: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {KEYS[name]}"),)

    async def refused(call: Any) -> grpc.aio.AioRpcError:
        is_stream = isinstance(call, grpc.aio.UnaryStreamCall)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call.read() if is_stream else call)
        return caught.value

    async with grpc_stub(service, authenticator, free_port) as stub:
        calls = [
            stub.Generate(request), stub.GenerateStream(request), stub.Describe(pb.DescribeRequest()),
            stub.Cancel(pb.CancelRequest(request_id="x")), stub.ListModels(pb.ListModelsRequest()),
        ]  # fmt: skip
        for call in calls:
            assert (await refused(call)).code() is grpc.StatusCode.UNAUTHENTICATED
        assert cell.submissions == []
        answer = await stub.Generate(request, metadata=metadata("plain"))
        assert answer.choices[0].text == ANSWER
        chunks = [chunk async for chunk in stub.GenerateStream(request, metadata=metadata("requests"))]
        assert "".join(chunk.choice.text for chunk in chunks) == ANSWER
        await stub.Generate(request, metadata=metadata("requests"))
        error = await refused(stub.Generate(request, metadata=metadata("requests")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(error.trailing_metadata() or ())[RETRY_KEY] == "30"
        error = await refused(stub.Generate(request, metadata=metadata("fast")))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_key_cannot_end_another_keys_requests(
    service: ApiService, authenticator: Authenticator, free_port: int, cell: CellStandIn
) -> None:
    cell.pause_s, cell.per_step = 0.05, 1
    request = pb.GenerateRequest(prompt="hi", max_tokens=100, request_id="mine")
    cancel = pb.CancelRequest(request_id="mine")
    async with grpc_stub(service, authenticator, free_port) as stub:
        plain, other = ((("authorization", f"Bearer {KEYS[name]}"),) for name in ("plain", "other"))
        call = stub.GenerateStream(request, metadata=plain)
        await call.read()
        assert (await stub.Cancel(cancel, metadata=other)).num_cancelled == 0
        await call.read()
        assert (await stub.Cancel(cancel, metadata=plain)).num_cancelled == 1
        await eventually(call.done)
        assert await call.code() is grpc.StatusCode.CANCELLED


def test_keys_do_not_take_from_each_other(tmp_path: Any) -> None:
    """What one key gets is the same whether or not another asks without pause."""

    def is_taken(key: KeyConfig, tokens: int, shared: Authenticator) -> bool:
        try:
            shared.reserve(key, tokens)
        except ApiError:
            return False
        return True

    def taken(with_other: bool) -> list[bool]:
        clock, outcome = Clock(), []
        greedy = KeyConfig(name="a", hash=hash_key(new_key()), limits=KeyLimits(tokens_per_minute=1000))
        modest = KeyConfig(name="b", hash=hash_key(new_key()), limits=KeyLimits(tokens_per_minute=600))
        shared = Authenticator(replicas=lambda: 2, environment={}, clock=clock)
        for _ in range(200):
            clock.now += 0.7
            if with_other:
                is_taken(greedy, 50, shared)
            outcome.append(is_taken(modest, 9, shared))
        return outcome

    alone = taken(False)
    assert alone == taken(True)
    assert 0 < sum(alone) < len(alone)


def test_without_keys_everybody_is_let_in() -> None:
    with Authenticator(environment={}).admitted(None, "admin", limited=True) as grant:
        assert grant.key is None
        assert grant.headers() == {}
        assert grant.named("x") == "x"


def test_cells_tell_keys_apart_but_not_whose_they_are(tmp_path: Any, authenticator: Authenticator) -> None:
    tenants = {}
    for name in ("plain", "other"):
        with authenticator.admitted(bearer(name)["Authorization"], "api") as grant:
            assert grant.key is not None
            tenants[name] = grant.tenant
            assert len(grant.tenant.label) == 16
            assert grant.tenant.label not in grant.key.hash
            assert name not in grant.tenant.label
    assert tenants["plain"] != tenants["other"]
    path = tmp_path / "one.yaml"
    path.write_text(
        yaml.safe_dump({"keys": [{"name": "plain", "hash": hash_key(KEYS["plain"]), "weight": 3}]})
    )
    alone = Authenticator(SecurityConfig(keys_file=path), environment={})
    with alone.admitted(bearer("plain")["Authorization"], "api") as grant:
        assert grant.tenant == NOBODY
