"""A front end that goes: its clients take their next request elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Farewell:
    """Asks clients to close their connections after the answer they get, once `is_leaving` is true.

    A connection that is closed between two requests fails the second, if the client does not try again.
    """

    def __init__(self, app: ASGIApp, is_leaving: Callable[[], bool]) -> None:
        self._app = app
        self._is_leaving = is_leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_leaving():
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, send_and_close if scope["type"] == "http" else send)
