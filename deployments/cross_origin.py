"""Pages of other origins: those that the configuration names may ask for text."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.idempotency import REPLAYED
from deployments.unknown_fields import HEADER

#: What pages may reach: nothing that changes the server, or shows what others asked.
_PATHS = ("/v1/", "/tokenize", "/tokenizer_info", "/detokenize")

#: Besides those that every page may read.
_SHOWN = ("X-Request-Id", "Request-Id", "Retry-After", "Server-Timing", REPLAYED, HEADER)


class CrossOrigin:
    """Answers browsers that ask whether a page may, and lets those pages read the answers (CORS).

    Args:
        app: the application.
        origins: as `http.allowed_origins`.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._for_pages = _rules(app, origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        await (self._for_pages if _is_open(scope) else self._app)(scope, receive, send)


def headers_for_page(scope: Scope, origins: Sequence[str]) -> dict[str, str]:
    """Headers by which a page may read an answer that is made outside of `CrossOrigin`: that to a bug."""
    origin = Headers(scope=scope).get("origin")
    if origin is None or not origins or not _is_open(scope):
        return {}
    rules = _rules(Response(), origins)
    headers = MutableHeaders(rules.simple_headers)
    if not rules.allow_all_origins and rules.is_allowed_origin(origin):
        rules.allow_explicit_origin(headers, origin)
    return dict(headers)


def _is_open(scope: Scope) -> bool:
    return bool(scope["type"] == "http" and scope["path"].startswith(_PATHS))


def _rules(app: ASGIApp, origins: Sequence[str]) -> CORSMiddleware:
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        # Chrome asks for it where a page from outside wants to reach a server within, or on its own machine.
        # Only pages that are named: with `*` any page that is open somewhere would use servers it cannot see.
        allow_private_network="*" not in origins,
        expose_headers=_SHOWN,
    )
