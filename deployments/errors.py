"""Errors of the HTTP API in OpenAI's shape: what was wrong, in which field, and what to do about it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from cluster.config_errors import field_meant
from cluster.stream_messages import Rejected
from cluster.validation_words import in_words

#: Most characters of a client's value repeated in a message.
_SHOWN = 80
#: Most models that a message names.
_MOST_NAMED = 8
#: Of a body where more is wrong nothing is named.
_MOST_WRONG = 1000


#: llm-d's header that tells a request not served from one that is wrong.
DROPPED_REASON = "x-llm-d-request-dropped-reason"


class ApiError(Exception):
    """A request that ends with an error response.

    Attributes:
        status: HTTP status.
        message: for people: what was wrong and what to do.
        param: the request field at fault.
        code: for programs, as OpenAI's where one exists.
        retry_after_s: when trying again may help.
        dropped_reason: why a request that is well formed was not served, in llm-d's terms.
        details: further fields of the error object.
        headers: of the response, besides.
        is_logged: whether a line of the log names it.
        event: how the stream in whose midst it happened tells it; None if as any stream does.
    """

    is_logged = False
    event: bytes | None = None

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        dropped_reason: str | None = None,
        details: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.dropped_reason = dropped_reason
        self.details = dict(details or {})
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status < 500:
            kind = "invalid_request_error"
        elif self.status == 503:
            kind = "service_unavailable_error"
        else:
            kind = "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": {**error, **self.details}}

    def response(
        self, headers: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None
    ) -> Response:
        """The whole HTTP response; `body` in place of OpenAI's error object."""
        sent = {**self.headers, **(headers or {})}
        if self.retry_after_s is not None:
            # The header holds whole seconds; rounding down would invite a retry that is too early.
            sent["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.dropped_reason is not None:
            sent[DROPPED_REASON] = self.dropped_reason
        return Response(
            msgspec.json.encode(body or self.body()),
            self.status,
            headers=sent,
            media_type="application/json",
        )


class WindowExceeded(ApiError):
    """A 400 for a prompt that leaves no room for its answer.

    Attributes:
        num_prompt, num_asked, window: tokens of the prompt, of the answer that is asked for, and of both
            together that there may be.
    """

    def __init__(self, message: str, param: str, *, num_prompt: int, num_asked: int, window: int) -> None:
        code = "context_length_exceeded"
        # LangChain with openai 3.57 sees only the message of an error, and looks for the code in it.
        super().__init__(400, f"{message} ({code})", param=param, code=code)
        self.num_prompt, self.num_asked, self.window = num_prompt, num_asked, window


def in_names(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error, with fields of the chat request in the names that another API has for them.

    What is inside a field is another thing there, and is left out.
    """
    theirs = re.compile(rf"`({'|'.join(names)})(?:\.[^`]*)?`")
    error.message = theirs.sub(lambda match: f"`{names[match[1]]}`", error.message)
    error.param = names.get((error.param or "").partition(".")[0], error.param)
    return error


def without_form(error: ApiError, form: re.Pattern[str]) -> ApiError:
    """The error, with its field as the JSON has it.

    Args:
        error: from pydantic, whose paths go through the name of the form that a thing has.
        form: matches the beginning of such a path; its group is what stays of that.
    """
    path = error.param or ""
    param = form.sub(r"\1", path)
    if param != path:
        error.param, error.message = param, error.message.replace(f"`{path}`", f"`{param}`")
    return error


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def model_not_found(asked: str | None, served: Sequence[str], *, needs_one: bool = False) -> ApiError:
    """A 404 that says which models there are; the first answers who names none, unless that `needs_one`."""
    names = ", ".join(f"'{name}'" for name in served[:_MOST_NAMED]) or "none that this API key knows"
    more = f" or one of {len(served) - _MOST_NAMED} more (/v1/models)" if len(served) > _MOST_NAMED else ""
    what = "No `model` is named." if asked is None else f"The model {_shorten(asked)} does not exist here."
    left_out = "" if needs_one else ", or be left out"
    return ApiError(
        404,
        f"{what} `model` may be {names}{more}{left_out}.",
        param="model",
        code="model_not_found",
    )


def body_too_large(limit: int) -> ApiError:
    """A 413 that says where the limit is set."""
    return ApiError(
        413,
        f"The request body is above {limit} bytes. Send a shorter prompt, or raise `http.max_body_bytes` "
        "in the server's configuration.",
        code="request_too_large",
    )


def body_too_slow(within_s: float | None) -> ApiError:
    """A 408 that says where the limit is set."""
    return ApiError(
        408,
        f"The request body did not come within {within_s:g} s, the server's `http.read_timeout_s`.",
        code="request_timeout",
        headers={"Connection": "close"},
    )


def not_ready(reason: str, retry_after_s: float = 2.0) -> ApiError:
    """A 503 for a cell that is starting, restarting or gone."""
    return ApiError(
        503, f"{reason} Try again in a moment.", code="service_unavailable", retry_after_s=retry_after_s
    )


def no_trace() -> ApiError:
    """A 400 that says where the trace of a request can be had."""
    return ApiError(
        400,
        "`speculation.trace` can be had here only in streams of /v1/completions and /v1/chat/completions.",
        param="speculation.trace",
        code="unsupported_parameter",
    )


def cancelled() -> ApiError:
    """A 499 (nginx's number) for a request that was ended by its id while somebody still waited for it."""
    return ApiError(499, "The request was cancelled before its answer was complete.", code="cancelled")


def internal(request_id: str) -> ApiError:
    """A 500 that hides what went wrong inside but can be found in the log."""
    return ApiError(
        500,
        f"The server failed on this request; its log names the cause under request id {request_id}.",
        code="internal_error",
    )


def from_rejection(rejected: Rejected, prompt_field: str) -> ApiError:
    """The response for a request the cell turned away."""
    code, message, retry = rejected.code, rejected.message, rejected.retry_after_s
    if code == "prompt_too_long":
        return ApiError(400, message, param=prompt_field, code="context_length_exceeded")
    if code == "unknown_adapter":
        return ApiError(404, message, param="model", code="model_not_found")
    if code in ("empty_prompt", "bad_token"):
        return ApiError(400, message, param=prompt_field, code=code)
    predicted = {} if rejected.predicted is None else {"predicted": msgspec.to_builtins(rejected.predicted)}
    if code == "slo_infeasible":
        return ApiError(400, message, param="slo", code=code, details=predicted)
    if code in ("queue_full", "saturated"):
        return ApiError(
            429,
            message,
            param="slo" if code == "saturated" else None,
            code=code,
            retry_after_s=1.0 if retry is None else retry,
            dropped_reason="rejected-saturated",
            details=predicted,
        )
    if code in ("draining", "not_ready"):
        return ApiError(503, message, code=code, retry_after_s=2.0 if retry is None else retry)
    if code == "duplicate_id":
        return ApiError(409, message, code=code)
    return ApiError(500, message, code=code)


def from_validation(
    error: ValidationError, model: type[BaseModel] | None = None, tag: str | None = None
) -> ApiError:
    """One readable message for the first field that is wrong.

    Args:
        error: what pydantic says of the body.
        model: the body's, in which fields that are called alike are looked for; None for what stands in
            configurations, too.
        tag: tells the forms of the body apart.
    """
    if error.error_count() > _MOST_WRONG:
        # Only all at once are to be had, and while those of a large body are written nobody is answered.
        return bad_request(
            f"More than {_MOST_WRONG:,} fields of the request body are wrong or unknown. The fields are "
            "listed in the server's /openapi.json.",
            None,
            "invalid_value",
        )
    first = error.errors(include_url=False)[0]
    kind, text, location = first["type"], first["msg"], first["loc"]
    if tag is not None:
        # Locations begin with the form's tag, which is in no field's name.
        location = (tag,) if kind.startswith("union_tag_") else location[1:]
        kind = "missing" if kind == "union_tag_not_found" else kind
    path = field_path(location)
    field = f"`{path}`" if location else "the request body"
    if kind == "extra_forbidden":
        name = _called_here(model, location) or field_meant(model, location)
        advice = f"Did you mean `{name}`? The" if name else "Remove it; the"
        listed = "docs/configuration.md" if model is None else "the server's /openapi.json"
        return bad_request(
            f"Unknown field {field}. {advice} fields are listed in {listed}.",
            path,
            "unknown_parameter",
        )
    if kind == "missing":
        return bad_request(f"The field {field} is required.", path, "missing_required_parameter")
    text = in_words(kind, text, first.get("ctx"))
    value = first.get("input")
    shown = "" if isinstance(value, dict | list) else f" (got {_shorten(value)})"
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return bad_request(f"{field}: {text}{shown}.", path if location else None, code)


#: What endpoints call differently; a name that is only alike is of another thing (`min_tokens`).
_SAME_MEANING = (
    {"max_tokens", "max_completion_tokens", "max_output_tokens"},
    {"prompt", "messages", "input"},
    {"system", "instructions"},
)


def _called_here(model: type[BaseModel] | None, location: tuple[int | str, ...]) -> str:
    """What this endpoint calls a field of another endpoint, if it has it by another name."""
    if model is None or len(location) != 1:
        return ""
    meant = [name for names in _SAME_MEANING if location[0] in names for name in names - {location[0]}]
    return next((name for name in sorted(meant) if name in model.model_fields), "")


def field_path(location: tuple[int | str, ...]) -> str:
    """How messages name a field, by the keys that lead to it."""
    return ".".join(str(part)[:_SHOWN] for part in location)


def _shorten(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
