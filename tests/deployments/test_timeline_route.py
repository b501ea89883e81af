"""`GET /debug/timeline` and `flotilla timeline`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest
from typer.testing import CliRunner

from deployments import cli
from deployments.api_service import ApiService
from deployments.openai_api import create_app
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import ANSWER, codec, ids

TRACE = b'{"traceEvents":[],"displayTimeUnit":"ms"}'


class TimedCell(CellStandIn):
    """A stand-in that keeps a timeline, or none."""

    trace: bytes | None = TRACE

    async def timeline(self) -> bytes | None:
        return self.trace


@pytest.fixture
async def timed() -> AsyncIterator[TimedCell]:
    cell = TimedCell(lambda submit: [*ids(ANSWER), *codec().eos_ids])
    yield cell
    await cell.close()


@pytest.fixture
async def client(timed: TimedCell) -> AsyncIterator[httpx.AsyncClient]:
    service = ApiService(timed, codec(), give_up_after_s=0.5)
    transport = httpx.ASGITransport(app=create_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http
    await service.close()


async def test_the_trace_is_passed_on(client: httpx.AsyncClient) -> None:
    answer = await client.get("/debug/timeline")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(answer.content) == json.loads(TRACE)


async def test_where_none_is_kept_the_answer_says_how_to_have_one(
    timed: TimedCell, client: httpx.AsyncClient
) -> None:
    timed.trace = None
    answer = await client.get("/debug/timeline")
    assert answer.status_code == 404
    assert "debug: {timeline:" in answer.json()["error"]["message"]


def test_the_command_says_that_nobody_listens() -> None:
    result = CliRunner().invoke(cli.app, ["timeline", "--url", "http://127.0.0.1:9"])
    assert result.exit_code != 0
    assert "cannot reach" in result.output
