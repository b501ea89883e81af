"""`flotilla chat` with servers of other kinds, and with such as are none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from deployments.chat_client import ChatOptions, run_chat
from tests.deployments.batch_server import Server

ANSWER = b'data: {"choices": [{"delta": {"content": "fine"}}]}\n\ndata: [DONE]\n\n'


async def chat(streams: list[bytes], monkeypatch: pytest.MonkeyPatch, status: int = 200) -> str:
    """What is shown of answers that are streamed like this, one after the other."""
    left = iter(streams)

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=next(left), content_type="text/event-stream", status=status)

    lines = iter([*("hello" for _ in streams), "/quit"])
    console = Console(record=True, width=200, highlight=False)
    monkeypatch.setattr(console, "input", lambda _: next(lines))
    async with Server(answer).listening() as url:
        assert await asyncio.to_thread(run_chat, ChatOptions(url=url), console) == 0
    return console.export_text()


@pytest.mark.parametrize(
    "data",
    [
        b"{no JSON",
        b'{"choices": "\xff"}',
        b"[1]",
        b"[" * 100_000,
        b'{"choices": 5}',
        b'{"choices": [{"delta": "text"}]}',
        b'{"choices": [{"delta": {"content": "' + b"x" * 2_000_000 + b'"}}]}',
    ],
    ids=lambda data: data[:40],
)
async def test_a_stream_that_is_no_chat_is_told_and_the_chat_goes_on(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = await chat([b"data: " + data + b"\n\ndata: [DONE]\n\n", ANSWER], monkeypatch)
    assert "what the server streams is no chat" in shown
    assert "fine" in shown
    assert len(shown) < 1000


async def test_an_error_in_bytes_of_another_encoding_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "d\ufffdfaut" in await chat([b"d\xe9faut"], monkeypatch, status=500)


async def test_other_servers_ways_to_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = (
        b'data:{"choices": [{"delta": {"reasoning": "I think"}}], "error": null, "metrics": []}\n\n'
        b'data:{"choices": [{"delta": {"reasoning": null, "content": "I say"}}]}\n\n'
        b'data:{"choices": [{"delta": null, "finish_reason": "stop"}]}\n\n'
        b'data:{"choices": null, "usage": {}}\n\ndata:[DONE]\n\n'
    )
    shown = await chat([stream], monkeypatch)
    assert "I think\n\nI say\n" in shown
    assert "server" not in shown


async def test_an_error_in_the_stream_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [b'data: {"error": {"message": "no [/place]"}}\n\n', b'data: {"error": "broken"}\n\n']
    shown = await chat(streams, monkeypatch)
    assert "no [/place]" in shown
    assert "broken" in shown
