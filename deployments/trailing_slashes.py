"""Paths with a slash at their end, as some clients write them."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

#: The page's own address, which the names of its files are relative to, ends without.
_KEPT = ("/", "/console/")


class WithoutTrailingSlash:
    """Answers `/v1/completions/` as `/v1/completions`.

    Starlette would redirect, to an address made of the `Host` header and the scheme that it sees: behind a
    proxy it is another than the client's, who may send neither body nor key there.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] == "http":
            path: str = scope["path"]
            own = path.removeprefix(scope.get("root_path", ""))
            if own.endswith("/") and own not in _KEPT:
                scope = {**scope, "path": path[:-1]}
        await self._app(scope, receive, send)
