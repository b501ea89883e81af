"""Adapters of the API: models of their own to clients, of one target; and salts of what prompts share."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from deployments.api_service import ApiService
from deployments.grpc_service import GenerationService
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from tests.fakes.cell_stand_in import CellStandIn

COMPLETIONS, CHAT, RESPONSES, MESSAGES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
)
USER = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello"},
    CHAT: {"messages": USER},
    RESPONSES: {"input": "hello"},
    MESSAGES: {"messages": USER, "max_tokens": 8},
}
#: Those that only count.
COUNTS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "a"},
    f"{RESPONSES}/input_tokens": {"input": "a"},
    f"{MESSAGES}/count_tokens": {"messages": USER},
}


@pytest.fixture
async def adapted(http: httpx.AsyncClient, cell: CellStandIn) -> httpx.AsyncClient:
    cell.adapters = {"terse": "/adapters/terse", "team/sql": "/adapters/sql"}
    return http


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("model", ["terse", "team/sql", "demo", None, ""])
@pytest.mark.api("completions", "model")
@pytest.mark.api("chat.completions", "model")
async def test_a_model_is_answered_with_its_adapter(
    adapted: httpx.AsyncClient, cell: CellStandIn, path: str, model: str | None
) -> None:
    named = {} if model is None else {"model": model}
    answer = await adapted.post(path, json=BODIES[path] | named)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == (model or "demo")
    assert cell.submissions[-1].adapter == ("" if model in ("demo", None, "") else model)
    streamed = await adapted.post(path, json=BODIES[path] | named | {"stream": True})
    assert f'"model":"{model or "demo"}"' in streamed.text.replace(" ", "")
    assert cell.submissions[-1].adapter == cell.submissions[-2].adapter


async def test_models_are_the_target_and_its_adapters(adapted: httpx.AsyncClient, cell: CellStandIn) -> None:
    cell.path = "/models/demo"
    listed = (await adapted.get("/v1/models")).json()
    assert [one["id"] for one in listed["data"]] == ["demo", "terse", "team/sql"]
    assert [one["root"] for one in listed["data"]] == ["/models/demo", "/adapters/terse", "/adapters/sql"]
    assert [one["parent"] for one in listed["data"]] == [None, "demo", "demo"]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("demo", "team/sql", False)
    for one in listed["data"]:
        assert (await adapted.get(f"/v1/models/{one['id']}")).json() == one


@pytest.mark.parametrize("path", BODIES | COUNTS)
async def test_another_model_is_not_found(adapted: httpx.AsyncClient, path: str) -> None:
    body = (BODIES | COUNTS)[path]
    for model in ("terse", "demo"):
        assert (await adapted.post(path, json=body | {"model": model})).status_code == 200
    answer = await adapted.post(path, json=body | {"model": "verbose"})
    assert answer.status_code == 404
    told = answer.json()["error"]["message"]
    assert "'verbose' does not exist here. `model` may be 'demo', 'terse', 'team/sql', or be left out" in told


async def test_many_models_are_not_all_named(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    cell.adapters = {f"adapter-{number}": "/somewhere" for number in range(20)}
    error = (await http.get("/v1/models/verbose")).json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'adapter-6' or one of 13 more (/v1/models), or be left out" in error["message"]


async def test_adapters_over_grpc(adapted: httpx.AsyncClient, cell: CellStandIn, service: ApiService) -> None:
    grpc = GenerationService(service)
    models = (await grpc.list_models()).models
    assert [(one.id, one.parent) for one in models] == [("demo", ""), ("terse", "demo"), ("team/sql", "demo")]
    assert [one.HasField("parent") for one in models] == [False, True, True]
    answer = await grpc.generate(pb.GenerateRequest(prompt="hello", model="terse"), {})
    assert answer.model == "terse"
    assert cell.submissions[-1].adapter == "terse"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.api("completions", "cache_salt")
@pytest.mark.api("chat.completions", "cache_salt")
@pytest.mark.api("responses", "cache_salt")
@pytest.mark.api("messages", "cache_salt")
async def test_a_salt_reaches_the_cell(http: httpx.AsyncClient, cell: CellStandIn, path: str) -> None:
    for salt, told in (("one client's", "one client's"), (None, "")):
        answer = await http.post(path, json=BODIES[path] | {"cache_salt": salt})
        assert answer.status_code == 200, answer.text
        assert cell.submissions[-1].cache_salt == told
    for wrong in ("", "x" * 257, 5, ["a"]):
        answer = await http.post(path, json=BODIES[path] | {"cache_salt": wrong})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert "`cache_salt`" in error["message"]
        assert path == MESSAGES or error["param"] == "cache_salt"
    answer = await http.post(
        path,
        content=b'{"cache_salt": "\\ud800", ' + str(BODIES[path]).replace("'", '"').encode()[1:],
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400, answer.text
