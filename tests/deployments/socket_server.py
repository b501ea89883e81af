"""Applications behind a real server, in the process of the test."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp

_LOOK_S = 0.005


class Server(uvicorn.Server):
    """Leaves signals to pytest, whose own handling stays in place."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class QuickServer(Server):
    """Looks every few milliseconds whether it is to end, or its connections have, for it ends with each test.

    uvicorn's own looks every tenth of a second, and sleeps for another one between them.
    """

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:
            await asyncio.sleep(_LOOK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.server_state
        for server in self.servers:
            server.close()
        for connection in list(state.connections):
            connection.shutdown()
        while state.connections or state.tasks:
            await asyncio.sleep(_LOOK_S)
        await self.lifespan.shutdown()


@contextlib.asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    """The URL under which it answers."""
    server = QuickServer(uvicorn.Config(app, port=0, log_level="error", lifespan="on"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(_LOOK_S)
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
        await asyncio.sleep(_LOOK_S)
    yield int(listener.getsockname()[1])
    server.should_exit = True
    await task
