"""A server that answers requests of batches as a test says, and the files that such a test has."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class Server:
    """Answers as `answer` says; keeps what it was sent.

    Attributes:
        asked: (path, headers, body) of requests.
    """

    def __init__(self, answer: Answer | None = None) -> None:
        self.answer = answer or good
        self.models = lambda: web.json_response({"data": [{"id": "first"}, {"id": "second"}]})
        self.asked: list[tuple[str, Any, dict[str, Any]]] = []
        self.num_open = self.most_open = 0

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append((request.path, request.headers, body))
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            return await self.answer(request, body)
        finally:
            self.num_open -= 1

    async def _get(self, request: web.Request) -> web.StreamResponse:
        return self.models()

    @contextlib.asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes([web.get("/v1/models", self._get), web.post("/v1/{path:.*}", self._post)])
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, shutdown_timeout=0.1)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def good(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    answer = {"id": "resp", "asked": body.get("prompt"), "usage": {"completion_tokens": 5}}
    return web.json_response(answer, headers={"X-Request-Id": f"of {body.get('prompt')}"})


def refusal(status: int, after: str | None = None) -> web.Response:
    headers = {} if after is None else {"Retry-After": after}
    return web.json_response({"error": {"message": "no [place]"}}, status=status, headers=headers)


def write_input(file: Path, number: int, **fields: Any) -> None:
    lines = [
        {
            "custom_id": f"r{index}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"p{index}", **fields},
        }
        for index in range(number)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_output(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_bytes().splitlines()]
