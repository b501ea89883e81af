"""`speculation.trace`: the token tree of every step in the chunks of a stream."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from deployments.errors import ApiError
from deployments.grpc_mapping import generation_request
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import ANSWER, codec, ids

BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 100},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100},
}
both = pytest.mark.parametrize("path", sorted(BASES))


async def chunks(http: httpx.AsyncClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    response = await http.post(path, json=BASES[path] | {"stream": True} | fields)
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def text_of(found: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in found for choice in chunk["choices"]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices
    )


@both
@pytest.mark.parametrize("stop", [[], ["return"]])
async def test_every_step_tells_its_tokens_and_its_tree(
    http: httpx.AsyncClient, path: str, stop: list[str]
) -> None:
    plain = await chunks(http, path, stop=stop)
    assert not any("flotilla" in chunk for chunk in plain)
    logprobs = True if "chat" in path else 0
    traced = await chunks(
        http, path, stop=stop, speculation={"trace": True}, logprobs=logprobs, return_token_ids=True
    )
    assert text_of(traced) == text_of(plain) == (ANSWER.partition("return")[0] if stop else ANSWER)
    told = [chunk for chunk in traced if "flotilla" in chunk]
    tokens = [token for chunk in told for token in chunk["flotilla"]["tokens"]]
    sent = [token for chunk in traced for token in chunk["choices"][0].get("token_ids", ())]
    assert [token["id"] for token in tokens] == sent
    assert sent == [*ids(ANSWER), *codec().eos_ids][: len(sent)]
    # With a stop string, what was held back for it is dropped.
    assert "".join(token["text"] for token in tokens) == text_of(plain)
    assert {token["logprob"] for token in tokens} == {-0.25}
    position = 0
    for number, chunk in enumerate(told, 1):
        step, tree = chunk["flotilla"], chunk["flotilla"]["tree"]
        assert (step["step"], step["position"], step["drafter"]) == (number, position, "small")
        assert tree["texts"] == [codec().token_text(token) for token in tree["tokens"]]
        accepted = [tree["tokens"][node] for node in tree["accepted"]]
        drafted = [token["id"] for token in step["tokens"] if token["drafter"] is not None]
        assert drafted == accepted[: len(step["tokens"])]
        assert {token["drafter"] for token in step["tokens"]} <= {"small", None}
        assert [token["depth"] for token in step["tokens"]] == list(range(1, len(step["tokens"]) + 1))
        position += len(step["tokens"])
    assert len(told) > 3


@both
async def test_a_trace_is_told_of_text_that_is_held_back(
    http: httpx.AsyncClient, cell: CellStandIn, path: str
) -> None:
    cell.per_step = 1  # characters of several tokens
    traced = await chunks(http, path, speculation={"trace": True})
    steps = [chunk["flotilla"] for chunk in traced if "flotilla" in chunk]
    assert [step["position"] for step in steps] == list(range(len(ids(ANSWER)) + 1))
    assert any(not token["text"] for step in steps[:-1] for token in step["tokens"])
    assert "".join(token["text"] for step in steps for token in step["tokens"]) == ANSWER


@both
async def test_a_trace_needs_a_stream(http: httpx.AsyncClient, path: str) -> None:
    response = await http.post(path, json=BASES[path] | {"speculation": {"trace": True}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "speculation.trace"


async def test_where_no_trace_can_be_had_it_is_refused(http: httpx.AsyncClient) -> None:
    body = {"input": "hello", "stream": True, "speculation": {"trace": True}}
    response = await http.post("/v1/responses", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "speculation.trace"
    message = pb.GenerateRequest(prompt="a", extra_body_json='{"speculation": {"trace": true}}')
    with pytest.raises(ApiError) as refused:
        generation_request(message, stream=True)
    assert refused.value.param == "speculation.trace"


async def test_a_resubmitted_request_goes_on_with_its_traces(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    cell.lose_after = [6]
    traced = await chunks(http, "/v1/completions", speculation={"trace": True})
    tokens = [token for chunk in traced for token in chunk.get("flotilla", {"tokens": []})["tokens"]]
    assert [token["id"] for token in tokens] == [*ids(ANSWER), *codec().eos_ids]
