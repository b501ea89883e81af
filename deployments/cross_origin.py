"""Pages of other origins: those that the configuration names may ask for text."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.unknown_fields import HEADER

#: What pages may reach: nothing that changes the server, or shows what others asked.
_PATHS = ("/v1/", "/tokenize", "/detokenize")

#: Besides those that every page may read.
_SHOWN = ("X-Request-Id", "Retry-After", "Server-Timing", HEADER)


class CrossOrigin:
    """Answers browsers that ask whether a page may, and lets those pages read the answers (CORS).

    Args:
        app: the application.
        origins: as `http.allowed_origins`.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._for_pages = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_SHOWN,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        is_open = scope["type"] == "http" and scope["path"].startswith(_PATHS)
        await (self._for_pages if is_open else self._app)(scope, receive, send)
