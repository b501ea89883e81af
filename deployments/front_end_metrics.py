"""Prometheus metrics of a front end: HTTP requests by route, open streams, gRPC calls."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.metric_catalog import REFUSALS, REFUSALS_AT_THE_DOOR
from cluster.metric_set import MetricSet
from deployments.errors import ApiError
from deployments.refusals import code_of, log_refusal
from deployments.request_context import RequestContext

_NO_ROUTE = "unknown"
_PROBES = ("/ready", "/ping")
#: Counted from zero on: of what comes before a series was first scraped, no rate and no increase tells. When
#: a cell is lost for good, all that a front end was answering fails at once.
_GRPC_METHODS = ("Generate", "GenerateStream", "Cancel")
_GRPC_CODES = ("OK", "INTERNAL", "UNAVAILABLE")
_GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_OK, _FAILURES = "200", ("500", "503", "504")


class FrontEndMetrics:
    """The metrics of one front end; all of its threads may count.

    Args:
        front_end: its id; a label of all its metrics.
        num_resubmitted: how many requests it has sent to cells again.
        num_silent: how many connections it has given up as the cell gave no sign of life.
        num_rejected: how many requests no cell took, by code and tier.
        tiers: configured ones, besides `default`.
        expires_at: Unix time at which the certificate that it serves with now expires; 0 without one.
    """

    def __init__(
        self,
        front_end: str = "",
        num_resubmitted: Callable[[], int] = lambda: 0,
        num_silent: Callable[[], int] = lambda: 0,
        num_rejected: Callable[[], Mapping[tuple[str, str], int]] = dict,
        tiers: Collection[str] = (),
        expires_at: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.front_end = front_end
        self.set = MetricSet("front_end", {"front_end": front_end})
        self._num_resubmitted = num_resubmitted
        self._num_silent = num_silent
        self._num_rejected = num_rejected
        self._expires_at = expires_at
        self.open = self.set.gauge("flotilla_http_requests_open")
        self.streams = self.set.gauge("flotilla_http_streams_open")
        for method in _GRPC_METHODS:
            for name in _GRPC_CODES:
                self.set.counter("flotilla_grpc_calls_total", method, name)
            self.set.histogram("flotilla_grpc_call_duration_seconds", method)
        for route in _GENERATING:
            self.set.counter("flotilla_http_requests_total", route, "POST", _OK)
            for status in _FAILURES:
                self.set.counter("flotilla_http_requests_total", route, "POST", status)
                self.set.counter("flotilla_http_streams_failed_total", route, status)
        for api in ("http", "grpc"):
            for code in REFUSALS_AT_THE_DOOR:
                self.set.counter("flotilla_request_errors_total", api, code)
        for tier in ("default", *tiers):
            for code in REFUSALS:
                self.set.counter("flotilla_front_end_requests_rejected_total", code, tier)

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """An HTTP request was answered."""
        self.set.counter("flotilla_http_requests_total", route, method, str(status)).inc()
        self.set.histogram("flotilla_http_request_duration_seconds", route).observe(seconds)

    def stream_failed(self, route: str, status: int) -> None:
        """A stream, whose status was sent when it began, ended with an error that has another."""
        self.set.counter("flotilla_http_streams_failed_total", route, str(status)).inc()

    def refused(self, api: str, code: str) -> None:
        """A request over `api` (`http`, `grpc`) was answered with an error."""
        self.set.counter("flotilla_request_errors_total", api, code).inc()

    @contextmanager
    def grpc_call(self, method: str) -> Iterator[Callable[[str], None]]:
        """A gRPC call; what it yields is told the status code, which else is OK, or UNKNOWN if it raises."""
        open_calls, begun, code = self.set.gauge("flotilla_grpc_calls_open"), time.perf_counter(), "OK"

        def ends_with(name: str) -> None:
            nonlocal code
            code = name

        open_calls.inc()
        try:
            yield ends_with
        except BaseException:
            code = "UNKNOWN" if code == "OK" else code
            raise
        finally:
            open_calls.dec()
            self.set.counter("flotilla_grpc_calls_total", method, code).inc()
            seconds = time.perf_counter() - begun
            self.set.histogram("flotilla_grpc_call_duration_seconds", method).observe(seconds)

    def refresh(self) -> None:
        """Bring everything up to date."""
        self.set.measure_process()
        self.set.gauge("flotilla_tls_certificate_expiry_timestamp_seconds").set(self._expires_at())
        self.set.grow(self, "flotilla_requests_resubmitted_total", self._num_resubmitted())
        self.set.grow(self, "flotilla_cells_silent_total", self._num_silent())
        for (code, tier), number in self._num_rejected().items():
            self.set.grow(self, "flotilla_front_end_requests_rejected_total", number, code, tier)

    def render(self) -> str:
        """The exposition text, up to date."""
        self.refresh()
        return self.set.render()


class RequestObserver:
    """Counts and times HTTP requests, and makes their id known to whatever is logged meanwhile.

    Plain ASGI: per chunk of a stream it adds one function call.
    """

    def __init__(self, app: ASGIApp, metrics: FrontEndMetrics | None) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with RequestContext.of_http(scope).entered() as request:
            try:
                if self._metrics is None:
                    await self._app(scope, receive, send)
                else:
                    await self._observe(self._metrics, request, scope, receive, send)
            except Exception:  # a bug, which is logged as one; the answer is `errors.internal`
                self._count("internal_error")
                raise
            finally:
                if request.error is not None:
                    self._refused(request.error, scope)

    def _refused(self, error: ApiError, scope: Scope) -> None:
        route = _route(scope)
        self._count(code_of(error))
        if (
            route not in _PROBES or error.status != 503
        ):  # a probe that finds it loading is answered as it asked
            log_refusal(error, status=error.status, route=route)

    def _count(self, code: str) -> None:
        if self._metrics is not None:
            self._metrics.refused("http", code)

    async def _observe(
        self,
        metrics: FrontEndMetrics,
        request: RequestContext,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        begun, status, is_stream = time.perf_counter(), 500, False

        def observed_send(message: Message) -> Awaitable[None]:
            nonlocal status, is_stream
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = dict(message.get("headers", ()))
                if headers.get(b"content-type", b"").startswith(b"text/event-stream"):
                    is_stream = True
                    metrics.streams.inc()
            return send(message)

        metrics.open.inc()
        try:
            await self._app(scope, receive, observed_send)
        finally:
            metrics.open.dec()
            found, route = _answering(scope), _route(scope)
            if is_stream:
                metrics.streams.dec()
                if request.error is not None:
                    metrics.stream_failed(route, request.error.status)
            # Of those that a route does not answer there are as many as clients make up.
            answered = set(getattr(found, "methods", None) or ())
            answered |= {"HEAD"} if "GET" in answered else set()  # `HeadAsGet`
            method = scope["method"] if scope["method"] in answered else "ANY"
            metrics.answered(route, method, status, time.perf_counter() - begun)


def _route(scope: Scope) -> str:
    return str(getattr(_answering(scope), "path", _NO_ROUTE))


def _answering(scope: Scope) -> BaseRoute | None:
    """The route that answered, or would have if the request had not been refused before it got there."""
    found: BaseRoute | None = scope.get("route")
    if found is None and "app" in scope:
        found = max(scope["app"].routes, key=lambda route: route.matches(scope)[0].value)
        found = scope["route"] = None if found.matches(scope)[0] is Match.NONE else found
    return found
