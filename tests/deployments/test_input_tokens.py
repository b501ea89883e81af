"""`/v1/responses/input_tokens` with the official client, over a stand-in cell."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.deployments.test_responses_api import CALL, TOOL
from tests.fakes.cell_stand_in import CellStandIn

PATH = "/v1/responses/input_tokens"


@pytest.fixture(autouse=True)
def roomy(cell: CellStandIn) -> None:
    cell.max_tokens = 2048


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "hello"},
        {"input": "hello", "instructions": "be brief"},
        {"input": "hello", "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True},
        {"input": "hello", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
                {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": CALL},
            ],
            "truncation": "disabled",
        },
    ],
    ids=["text", "instructions", "tools", "reasoning", "items"],
)
async def test_it_is_what_the_model_reads(
    client: AsyncOpenAI, cell: CellStandIn, fields: dict[str, Any]
) -> None:
    """It was 404: clients that measure a conversation before they send it had to guess."""
    counted = await client.responses.input_tokens.count(model="demo", **fields)
    assert counted.object == "response.input_tokens"
    assert not cell.submissions
    response = await client.responses.create(model="demo", **fields)
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens == len(cell.submissions[0].prompt)


async def test_every_field_may_be_left_out(client: AsyncOpenAI) -> None:
    few = await client.responses.input_tokens.count(instructions="be")
    more = await client.responses.input_tokens.count(instructions="be", input="brief")
    assert 0 < few.input_tokens < more.input_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.input_tokens.count()
    assert refused.value.param == "input"


async def test_more_than_the_window_holds_is_counted(client: AsyncOpenAI, cell: CellStandIn) -> None:
    counted = await client.responses.input_tokens.count(input="word " * 3000)
    assert counted.input_tokens > 3000
    cut = await client.responses.input_tokens.count(input="word " * 3000, truncation="auto")
    assert cut.input_tokens <= cell.max_tokens


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"input": 5}, "input", 400),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0", 400),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", 400),
        ({"input": "a", "conversation": "conv_1"}, "conversation", 400),
        ({"input": "a", "personality": "friendly"}, "personality", 400),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", 400),
        ({"input": "a", "surprise": 1}, "surprise", 400),
        ({"input": "a", "model": "other"}, "model", 404),
    ],
)
async def test_what_is_wrong_is_named_as_for_a_response(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str, status: int
) -> None:
    answer = await http.post(PATH, json=fields)
    assert answer.status_code == status
    assert str(answer.json()["error"]["param"]).startswith(param)
    if "personality" not in fields:
        assert (await http.post("/v1/responses", json=fields)).json() == answer.json()


async def test_null_is_the_same_as_left_out(http: httpx.AsyncClient) -> None:
    names = ("conversation", "instructions", "parallel_tool_calls", "personality", "previous_response_id")
    names += ("reasoning", "text", "tool_choice", "tools", "truncation", "model")
    answer = await http.post(PATH, json={"input": "a"} | dict.fromkeys(names))
    assert answer.json() == (await http.post(PATH, json={"input": "a"})).json()
    assert answer.status_code == 200
