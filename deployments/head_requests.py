"""HEAD where GET is answered: what load balancers and monitors ask before they ask for more."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadAsGet:
    """Answers HEAD as GET, status and headers, without the body (RFC 9110, 9.3.2).

    FastAPI's routes know GET only, those of Starlette both. To be the innermost, so that logs and metrics
    have the method that was asked with.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                # uvicorn reads the same scope: told of a GET it would miss the body that headers announce.
                scope["method"] = "HEAD"
                await send(message)
                # At once: a stream of events would never end.
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        # In place, and back: who is around this reads from the scope which route it was.
        scope["method"] = "GET"
        try:
            await self._app(scope, receive, send_head)
        finally:
            scope["method"] = "HEAD"
