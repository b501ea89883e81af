"""What answers say besides their text: of the server, of the sampling, and of what they go on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.config import TargetConfig
from cluster.served_target import served_path, system_fingerprint
from deployments.api_service import ApiService
from deployments.openai_api import create_app
from deployments.sampling_defaults import SamplingDefaults
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import ANSWER, codec

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
USER = {"role": "user", "content": "hello"}
BEGUN = {"role": "assistant", "content": "Well, "}


async def posted(http: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def chunks_of(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.api("chat.completions", "echo")
async def test_a_chat_shows_the_message_that_it_goes_on_with(http: httpx.AsyncClient, stream: bool) -> None:
    for messages, echo, shown in (
        ([USER, BEGUN], True, BEGUN["content"]),
        ([USER, BEGUN], False, ""),
        # The answer is no part of what somebody else says.
        ([USER], True, ""),
    ):
        goes_on = messages[-1] is BEGUN
        body = {"messages": messages, "continue_final_message": goes_on, "echo": echo}
        if stream:
            deltas = [chunk["choices"][0]["delta"] for chunk in await chunks_of(http, CHAT, body)]
            assert deltas[0]["role"] == "assistant"
            text = "".join(delta.get("content") or "" for delta in deltas)
        else:
            text = (await posted(http, CHAT, **body))["choices"][0]["message"]["content"]
        assert text == shown + ANSWER


async def test_the_token_that_came_is_told_also_without_alternatives(http: httpx.AsyncClient) -> None:
    """OpenAI tells up to one more than were asked for."""
    told = (await posted(http, COMPLETIONS, prompt="hello", logprobs=0))["choices"][0]["logprobs"]
    pairs = zip(told["tokens"], told["token_logprobs"], strict=True)
    assert told["top_logprobs"] == [{token: value} for token, value in pairs]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_every_answer_and_chunk_says_what_its_text_depends_on(
    http: httpx.AsyncClient, cell: CellStandIn, path: str
) -> None:
    cell.fingerprint = "flotilla-1-abc"
    body = {"prompt": "hello"} if path == COMPLETIONS else {"messages": [USER]}
    assert (await posted(http, path, **body))["system_fingerprint"] == "flotilla-1-abc"
    chunks = await chunks_of(http, path, body | {"stream": True})
    assert {chunk["system_fingerprint"] for chunk in chunks} == {"flotilla-1-abc"}


def test_a_fingerprint_is_of_what_rounds_and_of_nothing_else() -> None:
    plain = TargetConfig(path="/models/a")
    found = system_fingerprint(plain)
    for other in ({"path": "/models/b"}, {"dtype": "bfloat16"}, {"tensor_parallel": 2}, {"runner": "hf"}):
        assert system_fingerprint(plain.model_copy(update=other)) != found
    for same in ({"served_name": "b"}, {"num_slots": 64}, {"max_model_len": 99}, {"prefix_sharing": False}):
        assert system_fingerprint(plain.model_copy(update=same)) == found


async def test_the_model_says_where_its_tokenizer_lies(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    """`vllm bench serve` without `--model` reads it there."""
    cell.path = "/models/a"
    (card,) = (await http.get("/v1/models")).json()["data"]
    assert card["root"] == "/models/a"


def test_an_embedded_model_is_told_by_its_directory() -> None:
    path = Path(served_path("zoo:target-8x384"))
    assert (path / "tokenizer.json").is_file()
    assert served_path("/not/there") == "/not/there"


@pytest.mark.parametrize(
    ("asked", "told"),
    [({}, (0.7, 0.8)), ({"temperature": 0}, (0.0, 0.8)), ({"top_p": 0.5}, (0.7, 0.5))],
)
async def test_a_response_says_how_it_was_sampled(
    cell: CellStandIn, asked: dict[str, float], told: tuple[float, float]
) -> None:
    """Also where the model's makers chose, and not the request."""
    service = ApiService(cell, codec(), sampling=SamplingDefaults(temperature=0.7, top_p=0.8))
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://cell") as http:
        body = await posted(http, RESPONSES, input="hello", **asked)
    await service.close()
    assert (body["temperature"], body["top_p"], body["top_logprobs"]) == (*told, 0)
