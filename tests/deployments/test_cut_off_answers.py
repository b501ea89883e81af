"""Answers that a front end which goes can wait for no longer: their clients are told why they end."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from cluster.http_config import HttpConfig
from deployments.api_service import ApiService
from deployments.http_limits import server_config
from deployments.open_calls import OpenCalls
from deployments.openai_api import create_app
from tests.deployments.socket_server import listening
from tests.fakes.cell_stand_in import CellStandIn, eventually

LONG = {"prompt": "hi", "max_tokens": 200}


@pytest.mark.parametrize("request_timeout_s", [None, 60.0])
async def test_a_stream_ends_with_an_error_and_a_whole_answer_is_one(
    service: ApiService, cell: CellStandIn, request_timeout_s: float | None
) -> None:
    cell.pause_s = 0.05
    limits, calls = HttpConfig(port=0), OpenCalls()
    app = create_app(service, calls=calls, request_timeout_s=request_timeout_s)
    async with listening(server_config(app, limits)) as port, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}/v1/completions"
        asked = [
            asyncio.create_task(client.post(url, json={**LONG, "stream": stream})) for stream in (True, False)
        ]
        await eventually(lambda: len(cell.submissions) == 2)
        await asyncio.sleep(0.2)
        await asyncio.to_thread(calls.cut_off_from_outside)
        streamed, whole = await asyncio.gather(*asked)
        late = await client.post(url, json=LONG)
        await eventually(lambda: len(cell.cancels) == len(cell.submissions))
    assert streamed.status_code == 200
    assert streamed.text.count("data: {") > 1
    assert streamed.text.rsplit("\n\n", 2)[-2].startswith("event: error\ndata: ")
    assert "[DONE]" not in streamed.text
    for answer in (whole, late):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "draining"
        assert answer.headers["retry-after"] == "1"
    assert all("front end was removed" in answer.text for answer in (streamed, whole, late))


async def test_the_client_of_openai_says_so(service: ApiService, cell: CellStandIn) -> None:
    """A connection that breaks would be told as one, in httpx's words."""
    cell.pause_s = 0.05
    calls = OpenCalls()
    async with listening(server_config(create_app(service, calls=calls), HttpConfig(port=0))) as port:
        client = openai.AsyncOpenAI(api_key="none", base_url=f"http://127.0.0.1:{port}/v1", max_retries=0)
        stream = await client.completions.create(model="demo", prompt="hi", max_tokens=200, stream=True)
        texts = [(await anext(stream)).choices[0].text for _ in range(3)]
        calls.cut_off()
        with pytest.raises(openai.APIError, match="front end was removed"):
            texts += [chunk.choices[0].text async for chunk in stream]
        await client.close()
