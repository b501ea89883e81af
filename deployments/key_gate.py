"""Every HTTP request passes here first: its key, and what the key allows."""

from __future__ import annotations

from contextlib import ExitStack

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.security_config import Permission
from deployments.authentication import Authenticator, Grant, unauthenticated
from deployments.errors import ApiError
from deployments.idempotency import HEADER
from deployments.refusals import error_response
from deployments.sampling_mapping import CellInfo

#: Open to everybody who can connect: they tell nothing but whether the server works, or are but a page.
OPEN_PATHS = frozenset(("/health", "/ready", "/ping", "/console", "/console/"))
_PAGE_FILES = (".html", ".js", ".css", ".svg", ".png", ".ico", ".woff2")

#: Whose answers a request that is sent again with its key attaches to.
KEYED_PATHS = frozenset(("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"))
_KEY_HEADER = HEADER.lower().encode()

_PREFIXES: tuple[tuple[str, Permission], ...] = (
    ("/metrics", "metrics"),
    ("/debug", "debug"),
    ("/admin", "admin"),
)


def permission_for(path: str) -> Permission | None:
    """What a key must allow to reach a path; None for those open to everybody."""
    if path in OPEN_PATHS or (path.startswith("/console/") and path.endswith(_PAGE_FILES)):
        return None
    for prefix, permission in _PREFIXES:
        if path == prefix or path.startswith(f"{prefix}/"):
            return permission
    return "api"


def grant_of(scope: Scope) -> Grant | None:
    """What the request was let in by; None where nobody asked."""
    grant: Grant | None = scope.get("state", {}).get("grant")
    return grant


def seen_by(scope: Scope, info: CellInfo) -> CellInfo:
    """The cell with those of its models that the request's key may ask."""
    grant = grant_of(scope)
    return info if grant is None else grant.seen(info)


class KeyGate:
    """Answers 401, 403 and 429 itself; what it lets in finds its grant in the scope's state."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self._app = app
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A proxy's prefix is no part of the route.
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        permission = permission_for(path)
        if permission is None:
            await self._app(scope, receive, send)
            return
        is_limited = permission == "api" and scope["method"] == "POST"
        may_attach = path in KEYED_PATHS and any(name == _KEY_HEADER for name, _ in scope["headers"])
        with ExitStack() as stack:
            try:
                grant = stack.enter_context(
                    self._authenticator.admitted(
                        _authorization(scope), permission, limited=is_limited, may_attach=may_attach
                    )
                )
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["grant"] = grant
            await self._app(scope, receive, _telling(grant, send) if is_limited and grant.key else send)


def _telling(grant: Grant, send: Send) -> Send:
    """Also sends what remains of the key's limits once the response starts."""

    async def send_with_limits(message: Message) -> None:
        if message["type"] == "http.response.start":
            limits = ((name.encode(), value.encode()) for name, value in grant.headers().items())
            message["headers"] = [*message.get("headers", ()), *limits]
        await send(message)

    return send_with_limits


def _authorization(scope: Scope) -> str | None:
    """The header, or Anthropic's where there is none, since the latter may be meant for a gateway before us.

    Raises 401 for several, of which it is unclear who reads which.
    """
    found = [value for name, value in scope["headers"] if name == b"authorization"]
    if not found:
        found = [b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]
    if len(found) > 1:
        raise unauthenticated()
    return found[0].decode("latin-1") if found else None
