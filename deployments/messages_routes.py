"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Container
from functools import partial
from typing import Any, Protocol

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from deployments.answering import Call
from deployments.api_service import ApiService
from deployments.errors import ApiError
from deployments.messages_api import MessagesView
from deployments.messages_errors import MESSAGES
from deployments.messages_schema import (
    MESSAGES_FIELDS,
    MESSAGES_NEUTRAL,
    MessagesRequest,
    parse_messages,
    renamed,
)
from deployments.openai_schema import NEUTRAL_VALUES, GenerationRequest
from deployments.openapi import body_schema
from deployments.prompt_counts import count_prompt
from deployments.prompt_preparation import INLINE_BYTES, in_thread_if

#: A request's body as it came, and the JSON object in it, of which fields that are not known may be left out.
ReadBody = Callable[[Request, Container[str]], Awaitable[tuple[bytes, dict[str, Any]]]]


class Respond(Protocol):
    """Answers a checked request (`deployments.openai_api`)."""

    def __call__(
        self,
        request: Request,
        parsed: GenerationRequest,
        body: bytes,
        answer: Callable[[Call], Awaitable[bytes]],
        stream: Callable[[Call], AsyncGenerator[bytes, None]],
    ) -> Awaitable[Response]:
        """The response."""
        ...


def add_messages_routes(app: FastAPI, service: ApiService, read: ReadBody, respond: Respond) -> None:
    """Install the routes."""
    schema = body_schema(MessagesRequest, NEUTRAL_VALUES | MESSAGES_NEUTRAL)

    @app.post(MESSAGES, openapi_extra=schema)
    async def messages(request: Request) -> Response:
        """Answer a conversation, as Anthropic's API does."""
        body, data = await read(request, MESSAGES_FIELDS)
        view = MessagesView()
        chat = await in_thread_if(len(body) > INLINE_BYTES, partial(parse_messages, data))
        try:
            return await respond(request, chat, body, view.answer, view.stream)
        except ApiError as error:
            raise renamed(error) from None

    @app.post(f"{MESSAGES}/count_tokens", openapi_extra=schema)
    async def count_tokens(request: Request) -> Response:
        """How many tokens a conversation has; `max_tokens` may be left out."""
        body, data = await read(request, MESSAGES_FIELDS)
        if data.get("max_tokens") is None:
            data["max_tokens"] = 1
        # Its errors have this API's names already.
        chat = await in_thread_if(len(body) > INLINE_BYTES, partial(parse_messages, data))
        try:
            count = await count_prompt(service, request, chat)
        except ApiError as error:
            raise renamed(error) from None
        return Response(msgspec.json.encode({"input_tokens": count}), media_type="application/json")
