"""The routes of OpenAI's Responses API."""

from __future__ import annotations

from functools import partial

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from deployments.api_service import ApiService
from deployments.errors import ApiError
from deployments.messages_routes import ReadBody, Respond
from deployments.openai_schema import NEUTRAL_VALUES
from deployments.openapi import body_schema
from deployments.prompt_counts import count_prompt
from deployments.prompt_preparation import INLINE_BYTES, in_thread_if
from deployments.responses_api import ResponsesView
from deployments.responses_schema import (
    COUNT_NEUTRAL,
    RESPONSES_FIELDS,
    RESPONSES_NEUTRAL,
    ResponsesRequest,
    parse_count,
    parse_responses,
    renamed,
)

RESPONSES = "/v1/responses"


def add_responses_routes(app: FastAPI, service: ApiService, read: ReadBody, respond: Respond) -> None:
    """Install the routes."""

    @app.post(RESPONSES, openapi_extra=body_schema(ResponsesRequest, NEUTRAL_VALUES | RESPONSES_NEUTRAL))
    async def responses(request: Request) -> Response:
        """Answer an input; nothing is stored."""
        body, data = await read(request, RESPONSES_FIELDS)
        asked, chat = await in_thread_if(len(body) > INLINE_BYTES, partial(parse_responses, data))
        view = ResponsesView(asked)
        try:
            return await respond(request, chat, body, view.answer, view.stream)
        except ApiError as error:
            raise renamed(error) from None

    @app.post(
        f"{RESPONSES}/input_tokens",
        openapi_extra=body_schema(ResponsesRequest, NEUTRAL_VALUES | RESPONSES_NEUTRAL | COUNT_NEUTRAL),
    )
    async def input_tokens(request: Request) -> Response:
        """How many tokens the model would read of an input; `input` may be left out."""
        body, data = await read(request, RESPONSES_FIELDS | COUNT_NEUTRAL.keys())
        chat = await in_thread_if(len(body) > INLINE_BYTES, partial(parse_count, data))
        try:
            count = await count_prompt(service, request, chat)
        except ApiError as error:
            raise renamed(error) from None
        told = {"object": "response.input_tokens", "input_tokens": count}
        return Response(msgspec.json.encode(told), media_type="application/json")
