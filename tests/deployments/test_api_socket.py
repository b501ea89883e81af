"""The API over a real socket: the official client, clients that hang up, cells that are lost mid-stream."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest

from tests.fakes.cell_stand_in import CellStandIn, eventually
from tests.fakes.tiny_tokenizer import ANSWER, ids

BODY = {"prompt": "hi", "max_tokens": 100}


async def test_official_client(url: str, cell: CellStandIn) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["demo"]
        completion = await client.completions.create(model="demo", prompt="hi", max_tokens=100, logprobs=2)
        assert completion.choices[0].text == ANSWER
        assert completion.choices[0].logprobs is not None
        stream = await client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            extra_body={"slo": {"tpot_ms": 50}},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == ANSWER
        assert chunks[-1].usage is not None
        assert chunks[-1].model_extra is not None
        assert chunks[-1].model_extra["metrics"]["slo"]["met"] is True
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(model="other", prompt="hi")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "hi"}], temperature=3
            )
        assert caught.value.param == "temperature"
        cell.finish_reason = "error"
        stream_of_text = await client.completions.create(model="demo", prompt="hi", stream=True)
        with pytest.raises(openai.APIError, match="failed"):
            [chunk async for chunk in stream_of_text]


async def test_stream_arrives_in_steps(url: str, cell: CellStandIn) -> None:
    cell.pause_s = 0.03
    arrivals = []
    async with (
        httpx.AsyncClient() as client,
        client.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                arrivals.append(asyncio.get_running_loop().time())
    assert len(arrivals) >= 5
    assert arrivals[-1] - arrivals[0] > 0.1


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("when", ["streaming", "before the stream", "whole"])
async def test_hanging_up_cancels(url: str, cell: CellStandIn, when: str, n: int) -> None:
    cell.pause_s, cell.starved = 0.02, when == "before the stream"
    body = BODY | {"stream": when != "whole", "n": n, "stop": "never"}

    async def ask() -> None:
        async with (
            httpx.AsyncClient() as client,
            client.stream("POST", f"{url}/v1/completions", json=body) as response,
        ):
            async for _ in response.aiter_lines():
                if when == "streaming":
                    return

    task = asyncio.create_task(ask())
    await eventually(lambda: len(cell.submissions) == n)
    if when != "streaming":
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: len(cell.cancels) == n)
    assert set(cell.cancels) == {submit.request_id for submit in cell.submissions}


async def test_losing_the_cell_is_invisible(url: str, cell: CellStandIn) -> None:
    cell.lose_after, cell.pause_s = [2, 8, 8], 0.002

    async def ask(client: httpx.AsyncClient) -> str:
        response = await client.post(f"{url}/v1/completions", json=BODY | {"stream": True}, timeout=20)
        lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
        return "".join(choice["text"] for line in lines for choice in json.loads(line[6:])["choices"])

    async with httpx.AsyncClient() as client:
        assert await asyncio.gather(*(ask(client) for _ in range(4))) == [ANSWER] * 4
        # A receipt of the last life alone would claim times that nobody saw: the front end's clock counts.
        cell.lose_after, cell.pause_s = [4], 0.05
        body = (await client.post(f"{url}/v1/completions", json=BODY, timeout=20)).json()
    assert body["usage"]["completion_tokens"] == len(ids(ANSWER)) + 1
    assert body["metrics"]["e2e_ms"] > 100
    assert body["metrics"]["time_to_first_token_ms"] > 40


async def test_losing_the_cell_for_good_is_an_error_event(url: str, cell: CellStandIn) -> None:
    cell.pause_s = 0.02
    lines = []
    async with (
        httpx.AsyncClient(timeout=20) as client,
        client.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}) as response,
    ):
        async for line in response.aiter_lines():
            lines.append(line)
            if not cell.away:
                cell.away = True
                cell.hang_up()
    assert "event: error" in lines
    assert "data: [DONE]" not in lines
