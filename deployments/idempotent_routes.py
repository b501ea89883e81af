"""Answers over HTTP that are generated once, however often they are asked for (`idempotency`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, nullcontext

from starlette.requests import Request
from starlette.responses import Response

from cluster.idempotency_config import IdempotencyConfig
from deployments.answering import Call
from deployments.authentication import Grant
from deployments.errors import ApiError, bad_request
from deployments.event_streams import event_stream, unless_disconnected
from deployments.idempotency import HEADER, LAST_EVENT_ID, REPLAYED, Answers, Key, find_key, first_position
from deployments.key_gate import grant_of
from deployments.openai_schema import GenerationRequest, json_object
from deployments.receipts import server_timing
from deployments.replay_log import ReplayLog


def key_of(request: Request, config: IdempotencyConfig, body: bytes, grant: Grant | None) -> Key | None:
    """The key of a request, of the API key that it was let in by; None if it has none."""
    named = (HEADER, "X-Request-Id", LAST_EVENT_ID)
    if b'"request_id"' not in body and not any(name in request.headers for name in named):
        return None  # most requests; they are not parsed again
    for name in (HEADER, LAST_EVENT_ID):
        if config.enabled and len(request.headers.getlist(name)) > 1:
            raise bad_request(f"`{name}` came more than once; send it once.", name)
    owner = "" if grant is None or grant.key is None else grant.key.name
    return find_key(config, request.headers, request.url.path, lambda: json_object(body), owner)


async def answer_once(
    request: Request,
    parsed: GenerationRequest,
    answers: Answers,
    key: Key,
    begin: Callable[[], Awaitable[Call]],
    answer: Callable[[Call], Awaitable[bytes]],
    stream: Callable[[Call], AsyncGenerator[bytes, None]],
) -> Response:
    """The response to a request with a key.

    Args:
        request, parsed: what was asked.
        answers: those there are.
        key: of the request.
        begin: checks it; called only if there is no answer yet.
        answer, stream: how a call is shown.
    """
    if parsed.speculation is not None and parsed.speculation.trace:
        raise ApiError(
            400,
            f"`speculation.trace` shows the steps of one run, which no other run repeats: leave out "
            f"`{key.field}`, or the trace.",
            param=key.field,
            code="unsupported_parameter",
        )
    grant = grant_of(request.scope)
    first = first_position(request.headers) if parsed.stream else 0

    async def produce(log: ReplayLog) -> bool:
        # What it uses counts until its end, also when nobody reads it any longer.
        with nullcontext() if grant is None else grant.held():
            call = await begin()
            if parsed.stream:
                async with aclosing(stream(call)) as events:
                    async for event in events:
                        log.add_events(event)
            else:
                body = await answer(call)
                log.headers["Server-Timing"] = server_timing(call.receipt())
                log.add(body)
            return call.is_finished

    follower = answers.attach(key, produce)
    headers = {REPLAYED: "true"} if follower.is_replay else {}
    try:
        if parsed.stream:
            return await event_stream(request, follower.parts(first), headers, has_ids=True)
        body = await unless_disconnected(request, anext(follower.parts()))
    except BaseException:
        follower.close()
        raise
    follower.close()
    return Response(body, media_type="application/json", headers={**follower.log.headers, **headers})
