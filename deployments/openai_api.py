"""The OpenAI-compatible HTTP routes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Container,
    Mapping,
    Sequence,
)
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.idempotency_config import IdempotencyConfig
from cluster.metric_set import flotilla_version
from cluster.stream_messages import NOBODY
from deployments.admin_api import PoolControl, add_admin_routes
from deployments.answering import Call, answer, stream
from deployments.api_service import ApiService
from deployments.authentication import Authenticator
from deployments.call_ids import clean_request_id, new_call_id
from deployments.console import ConsoleState, add_console_routes
from deployments.cross_origin import CrossOrigin, headers_for_page
from deployments.debug_api import add_debug_routes
from deployments.errors import ApiError, bad_request, body_too_large, body_too_slow, internal
from deployments.event_streams import error_event, event_stream, unless_disconnected
from deployments.front_end_metrics import FrontEndMetrics, RequestObserver
from deployments.head_requests import HeadAsGet
from deployments.idempotency import Answers, seeded
from deployments.idempotent_routes import answer_once, key_of
from deployments.key_gate import KeyGate, grant_of, seen_by
from deployments.messages_errors import speaks_messages
from deployments.messages_routes import add_messages_routes
from deployments.metric_gathering import Gatherer, add_metric_routes
from deployments.objectives import Asked, ObjectiveError, asked_by_headers
from deployments.open_calls import OpenCalls
from deployments.openai_schema import (
    NEUTRAL_VALUES,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    json_object,
    validated,
)
from deployments.openapi import body_schema
from deployments.prompt_preparation import INLINE_BYTES, in_thread_if
from deployments.receipts import server_timing
from deployments.refusals import error_body, error_response
from deployments.request_context import RequestContext
from deployments.request_timeout import RequestTimeout
from deployments.responses_routes import add_responses_routes
from deployments.sampling_mapping import CellInfo
from deployments.tiers_api import add_tier_routes
from deployments.tokenize_api import add_tokenize_routes
from deployments.trailing_slashes import WithoutTrailingSlash
from deployments.unknown_fields import IgnoredFields, leave_out

_log = logging.getLogger(__name__)


def create_app(
    service: ApiService,
    *,
    max_body_bytes: int = 1 << 20,
    sends_request_id: bool = True,
    pool: PoolControl | None = None,
    metrics: FrontEndMetrics | None = None,
    gatherer: Gatherer | None = None,
    console: ConsoleState | None = None,
    authenticator: Authenticator | None = None,
    read_timeout_s: float | None = None,
    request_timeout_s: float | None = None,
    idempotency: IdempotencyConfig | None = None,
    ignores_unknown_fields: bool = False,
    allowed_origins: Sequence[str] = (),
    calls: OpenCalls | None = None,
) -> FastAPI:
    """The application of one front end.

    Args:
        service: what answers.
        max_body_bytes: larger bodies are refused.
        sends_request_id: whether responses get an `X-Request-Id`; not behind a proxy that adds its own.
        pool: what `/admin/drafters` changes; None turns it off.
        metrics: where requests are counted.
        gatherer: what `/metrics` answers; None without `metrics` answers with those of the only cell, with
            `metrics` leaves the route out (it is on a port of its own).
        console: what `/console` shows of the system; None shows what the service knows.
        authenticator: who is let in; everybody if None.
        read_timeout_s: how long a request's body may take to come; any time if None.
        request_timeout_s: how long a request may take; any time if None.
        idempotency: how answers are kept for retries; as by default if None.
        ignores_unknown_fields: whether fields of requests that do not exist are left out, and not refused.
        allowed_origins: of pages that may ask for text.
        calls: in which requests under way are noted; those that are cut off are told so.
    """
    started = int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.connect()
        yield
        await answers.close()
        await service.close()

    app = FastAPI(
        title="Flotilla",
        version=flotilla_version(),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )

    async def body_of(request: Request) -> bytes:
        check_is_json(request.headers)
        return await read_body(request, max_body_bytes, read_timeout_s)

    answers = Answers(idempotency or IdempotencyConfig(), metrics, request_timeout_s, error_event)
    app.state.answers = answers

    async def read(request: Request, known: Container[str]) -> tuple[bytes, dict[str, Any]]:
        body = await body_of(request)
        data = await in_thread_if(len(body) > INLINE_BYTES, partial(json_object, body))
        if ignores_unknown_fields:
            leave_out(data, known, request.scope)
        return body, data

    async def generate(request: Request, request_type: type[GenerationRequest]) -> Response:
        body, data = await read(request, request_type.model_fields.keys() | NEUTRAL_VALUES.keys())
        parsed = await in_thread_if(len(body) > INLINE_BYTES, partial(validated, data, request_type))
        return await respond(request, parsed, body)

    async def respond(
        request: Request,
        parsed: GenerationRequest,
        body: bytes,
        answer: Callable[[Call], Awaitable[bytes]] = answer,
        stream: Callable[[Call], AsyncGenerator[bytes, None]] = stream,
    ) -> Response:
        if parsed.request_id is not None and "x-request-id" not in request.headers:
            request.state.request_id = parsed.request_id
        grant = grant_of(request.scope)
        found = partial(key_of, request, answers.config, body, grant)
        key = await in_thread_if(len(body) > INLINE_BYTES, found)

        async def begin() -> Call:
            if grant is not None:
                grant.check_place()
                grant.seen(await service.info()).adapter_of(parsed.model)
            request_id = request.state.request_id
            call_id = new_call_id(request_id if grant is None else grant.named(request_id))
            asked = named_in(request.headers)
            repeatable = key is not None and bool(parsed.stream)
            call = await service.begin(
                seeded(parsed, key),
                request_id,
                asked,
                call_id=call_id,
                tenant=NOBODY if grant is None else grant.tenant,
                repeatable=repeatable,
            )
            if grant is not None:
                grant.take(call, parsed, await service.info())
            return call

        if key is not None:
            return await answer_once(request, parsed, answers, key, begin, answer, stream)
        call = await begin()
        if not parsed.stream:
            content = await unless_disconnected(request, answer(call))
            timing = {"Server-Timing": server_timing(call.receipt())}
            return Response(content, media_type="application/json", headers=timing)
        return await event_stream(request, stream(call))

    @app.post("/v1/completions", openapi_extra=body_schema(CompletionRequest, NEUTRAL_VALUES))
    async def completions(request: Request) -> Response:
        """Continue a prompt."""
        return await generate(request, CompletionRequest)

    @app.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest, NEUTRAL_VALUES))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await generate(request, ChatRequest)

    add_responses_routes(app, service, read, respond)
    add_messages_routes(app, service, read, respond)
    add_tokenize_routes(app, service, read)

    def card(info: CellInfo, model: str) -> dict[str, Any]:
        return {
            "id": model,
            "object": "model",
            "created": started,
            "owned_by": "flotilla",
            "root": info.adapters.get(model) or info.path or info.model,
            "parent": info.model if model in info.adapters else None,
            # As Anthropic's client reads it.
            "type": "model",
            "display_name": model,
            "created_at": datetime.fromtimestamp(started, UTC).isoformat(),
            "max_model_len": info.max_tokens,
            "drafters": list(info.drafters),
            "policy": info.policy,
        }

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """The served model, and its adapters."""
        info = seen_by(request.scope, await service.info(waits=True))
        ends = info.models or (None,)
        pages = {"has_more": False, "first_id": ends[0], "last_id": ends[-1]}
        return _json({"object": "list", "data": [card(info, one) for one in info.models], **pages})

    @app.get("/v1/models/{model_id:path}")
    async def model(request: Request, model_id: str) -> Response:
        """A served model, by its id."""
        info = seen_by(request.scope, await service.info(waits=True))
        info.adapter_of(model_id)
        return _json(card(info, model_id))

    @app.get("/health")
    async def health() -> Response:
        """Whether this process is alive."""
        return _json({"status": "ok"})

    # By the other name SageMaker's and RunPod's balancers ask, whom vLLM and SGLang answer, too.
    @app.get("/ready")
    @app.get("/ping")
    @app.post("/ping")
    async def ready() -> Response:
        """Whether requests would be served now."""
        info = await service.ready()
        return _json({"status": "ready", "model": info.model})

    @app.get("/version")
    async def version_route() -> Response:
        """The version that runs."""
        return _json({"version": flotilla_version()})

    if gatherer is not None or metrics is None:
        add_metric_routes(app, gatherer, service.prometheus)
    add_tier_routes(app, service)
    add_console_routes(app, console or ConsoleState(service))
    add_debug_routes(app, service.decisions, service.timeline, service.workers)
    add_admin_routes(app, pool, body_of)
    _install_error_handlers(app, sends_request_id, allowed_origins)
    app.add_middleware(HeadAsGet)
    app.add_middleware(RequestTimeout, limit_s=request_timeout_s, calls=calls)
    if authenticator is not None:
        app.add_middleware(KeyGate, authenticator=authenticator)
    if ignores_unknown_fields:
        app.add_middleware(IgnoredFields)
    if allowed_origins:
        app.add_middleware(CrossOrigin, origins=allowed_origins)
    app.add_middleware(RequestIds, sends=sends_request_id)
    app.add_middleware(RequestObserver, metrics=metrics)
    app.add_middleware(WithoutTrailingSlash)
    return app


def named_in(headers: Mapping[str, str]) -> Asked:
    """Objectives named in headers; raises 400 with the header at fault."""
    try:
        return asked_by_headers(headers)
    except ObjectiveError as error:
        raise bad_request(error.message, error.place) from None


def check_is_json(headers: Mapping[str, str]) -> None:
    """Refuse (415) a body that is not announced as JSON, or is compressed.

    A page in a browser may send a body of another kind to any server it can reach, this machine's own among
    them, without that server being asked whether it wants to hear from that page.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    if not is_json:
        raise ApiError(415, "Send a JSON body, with `Content-Type: application/json`.", code="not_json")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(415, "Send the body as it is, without `Content-Encoding`.", code="encoded_body")


async def read_body(request: Request, limit: int, within_s: float | None = None) -> bytes:
    """The request's body; raises 413 once it is known to be above `limit` bytes, 408 if it is late."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise body_too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise body_too_large(limit)
    except TimeoutError:
        raise body_too_slow(within_s) from None
    return bytes(body)


class RequestIds:
    """Gives every request an id, the client's `X-Request-Id` if it sent one, and returns it as such."""

    def __init__(self, app: ASGIApp, sends: bool = True) -> None:
        self._app = app
        self._sends = sends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry; plain ASGI because Starlette's middleware class would buffer disconnects of streams."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        state = scope.setdefault("state", {})
        state["request_id"] = clean_request_id(sent.decode("latin-1"))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Only now: a body may name another.
                ids = [
                    (name.encode(), value.encode()) for name, value in _id_headers(scope, self._sends).items()
                ]
                message["headers"] = [*message.get("headers", ()), *ids]
            await send(message)

        await self._app(scope, receive, send_with_id if _id_headers(scope, self._sends) else send)


def _id_headers(scope: Scope, sends: bool) -> dict[str, str]:
    """The request's id as its response tells it."""
    names = ["x-request-id"] if sends else []
    if speaks_messages(scope["path"].removeprefix(scope.get("root_path", ""))):
        names.append("request-id")  # Anthropic's client reads this one
    return dict.fromkeys(names, str(scope["state"]["request_id"]))


def _instead(path: str, there: Container[str]) -> str:
    """What was meant by a path that there is not, as of clients with another base URL."""
    paths = f"/v1{path}", path.removeprefix("/v1"), path.replace("//", "/")
    for meant, ends in zip(paths, ("with /v1", "without /v1", "without a slash"), strict=True):
        if meant != path and meant in there:
            return f"there is {meant}: the client's base URL is to end {ends}"
    return "the routes are listed in /openapi.json"


def _install_error_handlers(app: FastAPI, sends_request_id: bool, origins: Sequence[str]) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        there = {route.path for route in app.routes if isinstance(route, Route)}
        message = {
            404: f"There is no {request.url.path} here; {_instead(request.url.path, there)}.",
            405: f"{request.url.path} does not answer {request.method}.",
        }.get(error.status_code, str(error.detail))
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return error_response(ApiError(error.status_code, message, code=code), error.headers)

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(_: Request, __: ClientDisconnect) -> Response:
        # Nobody reads it; 499 is nginx's name for it in logs.
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        request_id = str(request.state.request_id)
        _log.error("request %s failed", request_id, exc_info=error)
        bug = internal(request_id)
        # Here, outside of everything, there is no request at hand, and nobody adds headers.
        headers = _id_headers(request.scope, sends_request_id) | headers_for_page(request.scope, origins)
        return bug.response(headers, error_body(bug, RequestContext.of_http(request.scope)))


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
