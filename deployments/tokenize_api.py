"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as vLLM has them."""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.api_service import ApiService
from deployments.chat_messages import ChatMessage, check_messages
from deployments.errors import bad_request
from deployments.key_gate import seen_by
from deployments.messages_routes import ReadBody
from deployments.openai_schema import NEUTRAL_VALUES, template_variables, validated
from deployments.openapi import body_schema
from deployments.prompt_preparation import (
    INLINE_BYTES,
    INLINE_CHARS,
    chat_tokens,
    in_thread_if,
    opens_turn,
    text_tokens,
)
from deployments.request_model import RequestModel
from deployments.sampling_mapping import CellInfo, check_token_ids
from deployments.schema_values import TokenId
from deployments.tools import MAX_TOOLS, Tool, ToolUse


class TokenizeRequest(RequestModel):
    """Body of `/tokenize`: a prompt, or a conversation under the model's template."""

    model: str | None = Field(None, description="Id of the target or of an adapter; the target if unset.")
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=4096)
    add_special_tokens: bool | None = Field(None, description="True with `prompt`, false with `messages`.")
    return_token_strs: bool | None = Field(
        None, description="Also return every token as the vocabulary spells it."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(None, max_length=64, description="As of a chat.")
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)


class DetokenizeRequest(RequestModel):
    """Body of `/detokenize`."""

    model: str | None = Field(None, description="Id of the target or of an adapter; the target if unset.")
    tokens: list[TokenId] = Field(max_length=1 << 20)


#: Fields of `/tokenize` that only a conversation has.
_CHAT_FIELDS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
    "tools",
)


def add_tokenize_routes(app: FastAPI, service: ApiService, read: ReadBody) -> None:
    """Install the routes; `read` reads a request's body within the server's limit."""

    @app.post("/tokenize", openapi_extra=body_schema(TokenizeRequest, NEUTRAL_VALUES))
    async def tokenize(request: Request) -> Response:
        """The tokens of a prompt or conversation."""
        body, data = await read(request, _known(TokenizeRequest))
        asked = await in_thread_if(len(body) > INLINE_BYTES, partial(validated, data, TokenizeRequest))
        info = await _info(service, request, asked.model)
        tokens = await _tokens(service, asked)
        strings = None
        if asked.return_token_strs:
            entry = service.codec.vocabulary_entry
            strings = await in_thread_if(len(tokens) > INLINE_CHARS, lambda: list(map(entry, tokens)))
        shown: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": info.max_tokens,
            "tokens": tokens,
            "token_strs": strings,
        }
        return _json(shown)

    @app.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest, NEUTRAL_VALUES))
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        body, data = await read(request, _known(DetokenizeRequest))
        asked = await in_thread_if(len(body) > INLINE_BYTES, partial(validated, data, DetokenizeRequest))
        check_token_ids("tokens", asked.tokens, await _info(service, request, asked.model))
        decode = partial(service.codec.decode, asked.tokens, skip_special_tokens=False)
        return _json({"prompt": await in_thread_if(len(asked.tokens) > INLINE_CHARS, decode)})

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """What the model's tokenizer is configured with, its chat template included."""
        return JSONResponse(service.codec.described())


def _known(kind: type[RequestModel]) -> Container[str]:
    return kind.model_fields.keys() | NEUTRAL_VALUES.keys()


async def _info(service: ApiService, request: Request, model: str | None) -> CellInfo:
    info = await service.info()
    seen_by(request.scope, info).adapter_of(model)  # all have the target's tokenizer
    return info


async def _tokens(service: ApiService, asked: TokenizeRequest) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        raise bad_request("Give either `prompt` or `messages`.", "prompt")
    if asked.prompt is not None:
        for name in _CHAT_FIELDS:
            if getattr(asked, name) is not None:
                raise bad_request(f"`{name}` needs `messages`.", name)
        return await text_tokens(
            service.codec, asked.prompt, add_special_tokens=asked.add_special_tokens is not False
        )
    assert asked.messages is not None
    check_messages(asked.messages)
    if asked.continue_final_message and asked.add_generation_prompt:
        raise bad_request(
            "`continue_final_message` and `add_generation_prompt` exclude each other.",
            "continue_final_message",
        )
    use = ToolUse(asked.tools, "auto", service.tool_parser)
    return await chat_tokens(
        service.codec,
        asked.messages,
        use,
        service.tool_parser,
        add_generation_prompt=opens_turn(asked.add_generation_prompt, continues=asked.continue_final_message),
        continue_final_message=bool(asked.continue_final_message),
        add_special_tokens=bool(asked.add_special_tokens),
        variables=template_variables(asked.reasoning_effort, asked.chat_template_kwargs),
    )


def _json(shown: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(shown), media_type="application/json")
