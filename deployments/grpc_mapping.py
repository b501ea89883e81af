"""Between the gRPC messages and what the HTTP API is made of, so that both check and answer alike."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from deployments.choice_state import ChoiceState
from deployments.errors import ApiError, bad_request, no_trace
from deployments.generation import Update
from deployments.openai_schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    json_object,
    validated,
)
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.sampling_mapping import CellInfo
from deployments.text_codec import TextCodec
from deployments.tool_calls import Parsed
from verifier.messages import TokenLogprobs

#: Trailing metadata of a failed call: the HTTP API's error object, and when to come back.
ERROR_KEY = "flotilla-error"
RETRY_KEY = "retry-after"
REQUEST_ID_KEY = "x-request-id"

#: Metadata beyond 8 KiB makes clients refuse the whole answer, and tell of nothing but that. A message is
#: sent twice, in the error object and as the status's, and a character takes up to 12 bytes in either.
_MAX_DETAILS = 1024
_MAX_JSON = 2048
_MAX_PARAM = 512

_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
#: Ours alone; the HTTP API has no such fields.
_OWN_FIELDS = ("extra_body_json", "proxy_call_id")
#: Needed before `extra_body_json` is read.
_TYPED_FIELDS = ("request_id",)
#: What the method called says already.
_IMPLIED_FIELDS = ("stream", "stream_options")

_STATUS_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ALREADY_EXISTS,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.FAILED_PRECONDITION,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


# -- requests ------------------------------------------------------------------------------------------


def generation_request(message: pb.GenerateRequest, *, stream: bool = False) -> GenerationRequest:
    """The request as the HTTP API would have read it; raises `ApiError` as that does."""
    body = _body(message)
    if stream:
        body["stream"] = True
    given = [name for name in _PROMPT_FIELDS if name in body]
    if len(given) != 1:
        found = " and ".join(f"`{name}`" for name in given) or "none of them"
        raise bad_request(
            f"Give one of `prompt`, `prompt_token_ids` and `messages`; the request has {found}.",
            given[-1] if given else "prompt",
            "invalid_value" if given else "missing_required_parameter",
        )
    request_type: type[GenerationRequest] = CompletionRequest
    if "messages" in body:
        request_type = ChatRequest
        if message.HasField("logprobs"):
            body["logprobs"], body["top_logprobs"] = True, body["logprobs"]
    elif "prompt_token_ids" in body:
        body["prompt"] = body.pop("prompt_token_ids")
    request = validated(body, request_type)
    if request.wants_trace:
        raise no_trace()
    return request


def _body(message: pb.GenerateRequest) -> dict[str, Any]:
    body = _fields(message)
    for name in _OWN_FIELDS:
        body.pop(name, None)
    if "slo" in body:
        body["slo"] = _slo(body["slo"])
    if not message.extra_body_json:
        return body
    extra = json_object(message.extra_body_json, "`extra_body_json`", "extra_body_json")
    extra = {name: value for name, value in extra.items() if value is not None}  # as if it was left out
    for name in extra:
        if name in _IMPLIED_FIELDS:
            raise bad_request(f"`{name}` follows from the method called; leave it out.", name)
        if name in _TYPED_FIELDS:
            raise bad_request(
                f"`{name}` is read from the field of that name, not from `extra_body_json`.", name
            )
        if name in body or (name == "top_logprobs" and "logprobs" in body):
            raise bad_request(f"`{name}` is given twice, also in `extra_body_json`.", name)
    return body | extra


def _slo(fields: dict[str, Any]) -> dict[str, Any]:
    """Objectives as the HTTP API has them: a number of milliseconds or a multiple, under one name."""
    found = dict(fields)
    for name in ("tpot", "ttft", "e2e"):
        if (multiple := found.pop(f"{name}_multiple", None)) is None:
            continue
        if f"{name}_ms" in found:
            raise bad_request(f"Give `slo.{name}_ms` or `slo.{name}_multiple`, not both.", f"slo.{name}_ms")
        found[f"{name}_ms"] = multiple
    return found


def _fields(message: Message, at: str = "") -> dict[str, Any]:
    """The fields that are set, under their names, with what JSON would hold; raises 400 for unknown ones.

    Args:
        message: what holds them.
        at: where it is in the request, as errors name it: nothing, or with a dot behind it.
    """
    found: dict[str, Any] = {}
    unknown = UnknownFieldSet(message)
    if len(unknown):
        name = f"{message.DESCRIPTOR.name}.{unknown[0].field_number}"
        raise bad_request(
            f"`{name}`: this server's {message.DESCRIPTOR.name} has no field of that number and type; leave "
            "it out.",
            name,
            "unknown_parameter",
        )
    for field, value in message.ListFields():
        place = f"{at}{field.name}"
        options = field.message_type.GetOptions() if field.message_type is not None else None
        if options is not None and options.map_entry:
            found[field.name] = {str(key): _value(place, value[key]) for key in value}
        elif field.is_repeated:
            found[field.name] = [_value(place, item) for item in value]
        else:
            found[field.name] = _value(place, value)
    return found


def _value(place: str, value: Any) -> Any:
    if isinstance(value, pb.ChatMessage):
        # proto3 tells no empty string from none, and a message has nothing else to say.
        return {"content": "", **_fields(value, f"{place}.")}
    if isinstance(value, Message):
        return _fields(value, f"{place}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise bad_request(f"`{place}` must be a finite number.", place)
    return value


# -- answers -------------------------------------------------------------------------------------------


class ChoiceWriter:
    """Choices of one answer as messages.

    Args:
        codec: the target's tokenizer.
        with_token_ids: whether token ids are told.
        with_logprobs: whether log-probabilities are.
        tokens_as_ids: whether their tokens are, as `token_id:17` in place of text.
    """

    def __init__(
        self, codec: TextCodec, *, with_token_ids: bool, with_logprobs: bool, tokens_as_ids: bool = False
    ) -> None:
        self._codec = codec
        self._tokens_as_ids = tokens_as_ids
        self._with_token_ids = with_token_ids
        self._with_logprobs = with_logprobs

    def whole(self, index: int, state: ChoiceState) -> pb.Choice:
        """A choice that is complete."""
        parsed = state.parse_whole()
        choice = self._choice(index, state.echo, parsed, state.tokens, state.logprobs)
        if self._with_token_ids:
            choice.prompt_token_ids.extend(state.prompt)
        self._add_logprobs(choice.prompt_logprobs, state.prompt[1:], state.prompt_logprobs)
        _end(choice, state.shown_finish_reason(state.finish_reason), state.stop_reason)
        return choice

    def delta(self, update: Update, state: ChoiceState) -> pb.Choice | None:
        """What an update adds to a choice; None if it is held back, as it may be part of a call."""
        parsed = state.parse(update.text, update.tokens, ends=update.finish_reason is not None)
        is_silent = not (
            parsed.content or parsed.calls or parsed.reasoning or update.finish_reason is not None
        )
        if is_silent and state.holds_back and not (self._with_token_ids or self._with_logprobs):
            return None
        echo = "" if state.started else state.echo
        choice = self._choice(update.choice, echo, parsed, update.tokens, update.logprobs)
        if self._with_token_ids and not state.started:
            choice.prompt_token_ids.extend(state.prompt)
        # Those of a prompt that is echoed, as no others are asked for in a stream.
        self._add_logprobs(choice.prompt_logprobs, state.prompt[1:], update.prompt_logprobs)
        state.started = True
        _end(choice, state.shown_finish_reason(update.finish_reason), update.stop_reason)
        return choice

    def _choice(
        self,
        index: int,
        echo: str,
        parsed: Parsed,
        tokens: Sequence[int],
        logprobs: Iterable[TokenLogprobs],
    ) -> pb.Choice:
        choice = pb.Choice(index=index, text=echo + parsed.content, reasoning=parsed.reasoning)
        for call in parsed.calls:
            choice.tool_calls.add(index=call.index, id=call.call_id, name=call.name, arguments=call.arguments)
        if self._with_token_ids:
            choice.token_ids.extend(tokens)
        if self._with_logprobs:
            self._add_logprobs(choice.logprobs, tokens, logprobs)
        return choice

    def _add_logprobs(self, shown: Any, tokens: Sequence[int], entries: Iterable[TokenLogprobs]) -> None:
        for token, entry in zip(tokens, entries, strict=False):
            one = shown.add()
            self._describe(one, token, entry.logprob)
            for other, value in zip(entry.top_ids, entry.top_logprobs, strict=True):
                self._describe(one.top_logprobs.add(), other, value)

    def _describe(self, shown: pb.TokenLogprobs | pb.TokenLogprob, token: int, logprob: float) -> None:
        shown.token_id = token
        shown.token = f"token_id:{token}" if self._tokens_as_ids else self._codec.token_text(token)
        shown.bytes = bytes(self._codec.token_bytes(token))
        shown.logprob = logprob


def _end(choice: pb.Choice, reason: str | None, stop: str | int | None) -> None:
    if reason is not None:
        choice.finish_reason = reason
    if isinstance(stop, str):
        choice.stop_string = stop
    elif stop is not None:
        choice.stop_token_id = stop


def usage(body: dict[str, Any]) -> pb.Usage:
    """The HTTP API's `usage` object."""
    return json_format.ParseDict(body, pb.Usage(), ignore_unknown_fields=True)


def metrics(body: dict[str, Any]) -> pb.Metrics:
    """The HTTP API's `metrics` object, the receipt."""
    return json_format.ParseDict(body, pb.Metrics(), ignore_unknown_fields=True)


def model(info: CellInfo, name: str | None = None) -> pb.Model:
    """The served model, or its adapter of that name."""
    return pb.Model(
        id=name or info.model,
        parent=info.model if name in info.adapters else None,
        max_model_len=info.max_tokens,
        vocab_size=info.vocab_size,
        drafters=info.drafters,
        policy=info.policy,
    )


# -- metadata and errors -------------------------------------------------------------------------------


def metadata_of(context: Any) -> dict[str, str]:
    """The text metadata that a client sent, by key; values of a key that came more than once are joined, as
    HTTP joins headers: so two API keys are none."""
    found: dict[str, str] = {}
    for key, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            found[key] = f"{found[key]}, {value}" if key in found else value
    return found


def authorization_of(metadata: Mapping[str, str]) -> str | None:
    """The metadata `authorization`, or where there is none `x-api-key`, as the headers of HTTP."""
    key = metadata.get("x-api-key")
    return metadata.get("authorization", None if key is None else f"Bearer {key}")


def deadline_exceeded(limit_s: float | None) -> ApiError:
    """A 504 for a call that took longer than the server lets calls take."""
    return ApiError(
        504,
        f"The request took longer than {limit_s:g} s, the server's `grpc.default_deadline_s`; ask for fewer "
        "tokens, or set a longer deadline.",
        code="deadline_exceeded",
    )


def status(error: ApiError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Code, message and trailing metadata of a failed call."""
    fallback = grpc.StatusCode.INVALID_ARGUMENT if error.status < 500 else grpc.StatusCode.INTERNAL
    code = _STATUS_CODES.get(error.status, fallback)
    details = _fitting(error.message[:_MAX_DETAILS], _MAX_JSON)
    body = error.body()["error"] | {"message": details}
    if error.param is not None:
        body["param"] = _fitting(error.param, _MAX_PARAM)
    # Metadata is ASCII.
    trailing = [(ERROR_KEY, json.dumps(body, ensure_ascii=True))]
    if error.retry_after_s is not None:
        trailing.append((RETRY_KEY, str(max(1, math.ceil(error.retry_after_s)))))
    return code, details, tuple(trailing)


def _fitting(text: str, most: int) -> str:
    """As much of the beginning of a text as takes at most so many bytes in JSON of ASCII."""
    text = text[:most]
    while len(json.dumps(text, ensure_ascii=True)) > most:
        text = text[: len(text) * 9 // 10]
    return text
