"""Fields of requests that are not known here: left out where the configuration says so, and told of."""

from __future__ import annotations

from collections.abc import Container
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Names the fields of the request that were left out.
HEADER = "X-Ignored-Fields"

#: Most names told, and most characters of each: they are the client's.
_NAMES, _CHARACTERS = 32, 64


def leave_out(data: dict[str, Any], known: Container[str], scope: Scope) -> None:
    """Take from a body what is not `known`; the response will tell its names."""
    # A null asks for nothing, as everywhere.
    ignored = sorted(name for name, value in data.items() if name not in known and value is not None)
    for name in ignored:
        del data[name]
    scope["state"]["ignored_fields"] = ignored


class IgnoredFields:
    """Tells in a header of the response what of the request was left out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""

        async def told(message: Message) -> None:
            ignored = (
                scope["state"].get("ignored_fields") if message["type"] == "http.response.start" else None
            )
            if ignored:
                names = ", ".join(quote(name[:_CHARACTERS]) for name in ignored[:_NAMES])
                message["headers"] = [*message.get("headers", ()), (HEADER.lower().encode(), names.encode())]
            await send(message)

        await self._app(scope, receive, told if scope["type"] == "http" else send)
