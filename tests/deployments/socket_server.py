"""Applications behind a real server, in the process of the test."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp


class Server(uvicorn.Server):
    """Leaves signals to pytest, whose own handling stays in place."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    """The URL under which it answers."""
    server = Server(uvicorn.Config(app, port=0, log_level="error", lifespan="on"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    await task


@contextlib.asynccontextmanager
async def listening(config: uvicorn.Config, send_buffer: int | None = None) -> AsyncIterator[int]:
    """The port on which a server of this configuration answers; `send_buffer` in bytes."""
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = Server(config)
    task = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    yield int(listener.getsockname()[1])
    server.should_exit = True
    await task
