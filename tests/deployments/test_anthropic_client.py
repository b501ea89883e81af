"""Anthropic's own client beyond single messages: its runner of tools, its models, its ids of requests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anthropic
import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from anthropic.types.beta import BetaMessageParam

from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import codec, ids

HELLO: BetaMessageParam = {"role": "user", "content": "hello"}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.fixture(autouse=True)
def roomy(cell: CellStandIn) -> None:
    cell.max_tokens = 2048


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=url, api_key="unused", max_retries=0) as made:
        yield made


async def test_its_runner_of_tools_goes_on_without_a_conversation_held_here(
    client: AsyncAnthropic, cell: CellStandIn
) -> None:
    @beta_async_tool
    async def get_weather(city: str) -> str:
        """Weather of a city."""
        return f"rain in {city}"

    cell.script = lambda submit: [*ids("So." if len(cell.submissions) > 1 else CALL), *codec().eos_ids]
    runner = client.beta.messages.tool_runner(
        model="demo", max_tokens=200, messages=[HELLO], tools=[get_weather]
    )
    told = [block.type for message in [message async for message in runner] for block in message.content]
    assert told == ["tool_use", "text"]
    assert "rain in Oslo" in codec().decode(cell.submissions[-1].prompt)


async def test_models(client: AsyncAnthropic) -> None:
    (model,) = [model async for model in client.models.list()]
    assert (model.id, model.display_name, model.type) == ("demo", "demo", "model")
    assert (await client.models.retrieve("demo")).created_at == model.created_at
    assert model.created_at.tzinfo is not None


async def test_ids_of_requests(client: AsyncAnthropic) -> None:
    asked = await client.messages.with_raw_response.create(model="demo", max_tokens=9, messages=[HELLO])
    message = await asked.parse()
    assert message._request_id == asked.headers["x-request-id"]
    with pytest.raises(anthropic.NotFoundError) as refused:
        await client.messages.create(model="other", max_tokens=9, messages=[HELLO])
    assert refused.value.request_id is not None
    assert refused.value.request_id == refused.value.response.headers["x-request-id"]
