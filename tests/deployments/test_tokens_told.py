"""However an answer comes, its text, thoughts and log-probabilities are those of the tokens there were."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken

from deployments.api_service import ApiService
from deployments.grpc_service import GenerationService
from deployments.openai_api import create_app
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.text_codec import TextCodec
from tests.deployments.test_harmony_calls import marked
from tests.fakes import tiny_tokenizer
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import ANSWER

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "name": "f"}]
MANY_BYTES = "日本語🙂🚀" * 4


@asynccontextmanager
async def serving(
    tokens: Sequence[int], codec: TextCodec, per_step: int = 1, **how: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, ApiService]]:
    """A front end whose answers are these tokens, so many of them with each step."""
    cell = CellStandIn(lambda _: [*tokens, *codec.eos_ids], max_tokens=2048)
    cell.per_step, cell.vocab_size = per_step, 4096
    service = ApiService(cell, codec, **how)
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client, service
    await service.close()
    await cell.close()


def shown(tokens: Sequence[int], codec: TextCodec) -> list[str]:
    return [codec.token_text(token) for token in tokens]


@pytest.mark.parametrize("key", [{}, {"Idempotency-Key": "once"}])
@pytest.mark.parametrize("per_step", [1, 3, 1000])
@pytest.mark.api("responses", "top_logprobs", "stream")
async def test_a_stream_with_a_key_has_all_text_beside_log_probabilities(
    per_step: int, key: dict[str, str]
) -> None:
    """What may be sent again is cut into single tokens, which were cut once more: of nothing."""
    codec = tiny_tokenizer.codec()
    tokens = tiny_tokenizer.ids(ANSWER)
    async with serving(tokens, codec, per_step, tool_parser="hermes") as (client, _):
        body = {"input": "hi", "stream": True, "top_logprobs": 0}
        response = await client.post("/v1/responses", json=body, headers=key)
    told = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    deltas = [one for one in told if one["type"] == "response.output_text.delta"]
    assert "".join(one["delta"] for one in deltas) == ANSWER
    assert [entry["token"] for one in deltas for entry in one["logprobs"]] == shown(tokens, codec)
    (part,) = told[-1]["response"]["output"][0]["content"]
    assert part["text"] == ANSWER


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "a<<b"),
        ("hermes", "if x <<<y: z"),
        ("hermes", "<<"),
        ("glm", "\n\n\nb"),
        ("mistral", "say [[TOOL"),
    ],
)
@pytest.mark.api("responses", "top_logprobs", "tools")
async def test_text_that_begins_like_a_call_keeps_its_log_probabilities(
    parser: str, text: str, *, stream: bool
) -> None:
    """Of two equal tokens, the first told and the second held back, the first was lost."""
    codec, tokens = tiny_tokenizer.codec(), tiny_tokenizer.ids(text)
    async with serving(tokens, codec, tool_parser=parser, reasoning_parser="none") as (client, _):
        body = {"input": "hi", "top_logprobs": 0, "tools": TOOLS, "stream": stream}
        response = await client.post("/v1/responses", json=body)
    whole = json.loads(response.text.strip().split("data: ")[-1])["response"] if stream else response.json()
    (part,) = whole["output"][-1]["content"]
    assert part["text"] == text
    *told, end = [entry["token"] for entry in part["logprobs"]]  # which is a token, too
    assert (told, end) == (shown(tokens, codec), codec.token_text(min(codec.eos_ids)))


@pytest.mark.parametrize("per_step", [1, 3, 1000])
@pytest.mark.api("responses", "top_logprobs")
async def test_between_messages_of_one_answer_no_log_probability_is_lost(per_step: int) -> None:
    codec = marked()
    said = "<|channel|>commentary<|message|>One.<|end|>", "<|start|>assistant<|channel|>final<|message|>Two."
    tokens = codec.encode("".join(said), add_special_tokens=False)
    async with serving(tokens, codec, per_step) as (client, _):
        response = await client.post("/v1/responses", json={"input": "hi", "top_logprobs": 0})
    (part,) = response.json()["output"][-1]["content"]
    assert part["text"] == "One.\n\nTwo."
    assert "".join(entry["token"] for entry in part["logprobs"]).startswith("One.Two.<|")


@pytest.mark.api("chat.completions", "stream_options")
async def test_tokens_of_a_thought_are_as_many_at_once_as_in_a_stream() -> None:
    """Where a mark is several tokens, they were reckoned by the characters of the whole answer."""
    codec = marked()
    thought = "<|channel|>analysis<|message|>" + MANY_BYTES + "<|end|>"
    answer = "<|start|>assistant<|channel|>final<|message|>" + "    return a + b\n" * 8
    tokens = codec.encode(thought + answer, add_special_tokens=False)
    async with serving(tokens, codec) as (client, _):
        body = {"messages": MESSAGES}
        whole = (await client.post("/v1/chat/completions", json=body)).json()
        stream = body | {"stream": True, "stream_options": {"include_usage": True}}
        streamed = (await client.post("/v1/chat/completions", json=stream)).text
    usage = json.loads(streamed.strip().split("\n\n")[-2][6:])["usage"]
    assert whole["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]
    of_thought = codec.encode(MANY_BYTES, add_special_tokens=False)
    assert usage["completion_tokens_details"]["reasoning_tokens"] >= len(of_thought)
    assert whole["choices"][0]["message"]["content"] == "    return a + b\n" * 8


async def test_tokens_of_a_thought_that_show_nothing_are_counted_over_grpc() -> None:
    made = tiny_tokenizer.tokenizer.__wrapped__()
    made.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in ("<think>", "</think>")])
    codec = TextCodec(made)
    thought = codec.encode(f"<think>{MANY_BYTES}</think>", add_special_tokens=False)
    tokens = [*thought, *codec.encode("Hi.", add_special_tokens=False)]
    async with serving(tokens, codec, reasoning_parser="think") as (_, service):
        grpc, asked = GenerationService(service), pb.GenerateRequest()
        asked.messages.add(role="user", content="hi")
        whole = (await grpc.generate(asked, {})).usage
        streamed = [chunk async for chunk in grpc.generate_stream(asked, {})][-1].usage
    for usage in (whole, streamed):
        assert usage.completion_tokens_details.reasoning_tokens == len(thought)
