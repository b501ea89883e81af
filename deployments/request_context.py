"""Which request is being answered, for whatever is logged or traced on its way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from deployments.errors import ApiError

#: Headers of HTTP, and metadata of gRPC, by which a trace goes on from process to process.
TRACE_CONTEXT = ("traceparent", "tracestate")


@dataclass
class RequestContext:
    """A request on its way through a front end.

    Attributes:
        state: where its id stands, as `request_id`, which a body may still change, and its `grant`.
        headers: of trace context (W3C `traceparent`, `tracestate`).
        tier: service tier, once it is known.
        error: what it was answered with, if that was one.
        path: of HTTP, without a proxy's prefix.
    """

    state: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    tier: str = ""
    error: ApiError | None = None
    path: str = ""

    @classmethod
    def of_http(cls, scope: Scope) -> RequestContext:
        """That of an ASGI request."""
        sent = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        headers = {name: value for name, value in sent if name in TRACE_CONTEXT}
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return cls(scope.setdefault("state", {}), headers, path=path)

    @property
    def request_id(self) -> str:
        """How the client and the log call it."""
        return str(self.state.get("request_id", ""))

    @contextmanager
    def entered(self) -> Iterator[RequestContext]:
        """It is the present one within."""
        before = _current.get()
        _current.set(self)
        try:
            yield self
        finally:
            # Not by a token: a generator that nobody read to its end is closed in another task's context.
            _current.set(before)


_current: ContextVar[RequestContext | None] = ContextVar("request", default=None)


def current_request() -> RequestContext | None:
    """The request being answered here; None outside of all."""
    return _current.get()
