"""A small OpenAI-compatible server whose answers the tests know."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web

Answer = Callable[[dict[str, Any]], list[str]]


class FakeServer:
    """Streams one word a chunk; remembers the bodies and keys it was sent and how many it served at once."""

    def __init__(self, answer: Answer, pause_s: float = 0.0) -> None:
        self.answer = answer
        self.pause_s = pause_s
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_once = 0
        self.num_connections: set[int] = set()
        self._running = 0

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.num_connections.add(id(request.transport))
        if body.get("prompt") == "refuse":
            return web.json_response({"error": {"message": "queue full", "code": "queue_full"}}, status=429)
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def event(data: str) -> None:
            await response.write(f"data: {data}\n\n".encode())

        try:
            is_chat = request.path.endswith("/chat/completions")
            words = self.answer(body)
            if is_chat:
                first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                await event(json.dumps({"choices": [first]}))
            for place, word in enumerate(words):
                await asyncio.sleep(self.pause_s)
                if word == "<cut>":
                    return response
                finish = "stop" if place == len(words) - 1 else None
                part = {"delta": {"content": word}} if is_chat else {"text": word}
                await event(json.dumps({"choices": [{"index": 0, **part, "finish_reason": finish}]}))
            usage = {"prompt_tokens": 3, "completion_tokens": 2 * len(words)}
            steps = {"num_spec_steps": len(words), "num_draft_tokens": 8, "num_accepted_draft_tokens": 4}
            steps_off = (body.get("speculation") or {}).get("mode") == "off"
            metrics = {} if steps_off else {"speculative_decoding": {**steps, "drafters": {"small": 4}}}
            await event(json.dumps({"choices": [], "usage": usage, "metrics": metrics}))
            await event("[DONE]")
        finally:
            self._running -= 1
        return response


@asynccontextmanager
async def serving(server: FakeServer) -> AsyncIterator[str]:
    """Run the server; gives its address."""
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.generate)
    app.router.add_post("/v1/chat/completions", server.generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@contextmanager
def serving_in_a_thread(server: FakeServer) -> Iterator[str]:
    """As `serving`, for clients that have an event loop of their own."""
    with asyncio.Runner() as runner:
        served = serving(server)
        url = runner.run(served.__aenter__())
        ended = threading.Event()

        async def until_ended() -> None:
            while not ended.is_set():
                await asyncio.sleep(0.01)

        background = threading.Thread(target=lambda: runner.run(until_ended()))
        background.start()
        try:
            yield url
        finally:
            ended.set()
            background.join()
            runner.run(served.__aexit__(None, None, None))
