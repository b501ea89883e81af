"""Errors in the form of Anthropic's Messages API."""

from __future__ import annotations

from typing import Any

from deployments.errors import ApiError, WindowExceeded

#: Routes that answer in that API's form.
MESSAGES = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def speaks_messages(path: str) -> bool:
    """Whether a route's clients expect this form."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def messages_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """The body, with `param` and `code` besides what that API has."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    told = {"type": kind, "message": _message(error), "param": error.param, "code": error.code}
    return {"type": "error", "error": {**told, **error.details}, "request_id": request_id}


def _message(error: ApiError) -> str:
    """What it says; agents know a window that is exceeded by these words, and ask for less."""
    if isinstance(error, WindowExceeded):
        if error.num_asked:
            lengths = f"{error.num_prompt} + {error.num_asked} > {error.window}"
            return (
                f"input length and `max_tokens` exceed context limit: {lengths}, "
                "decrease input length or `max_tokens` and try again"
            )
        return f"prompt is too long: {error.num_prompt} tokens > {error.window} maximum"
    if error.code == "context_length_exceeded":
        return f"prompt is too long: {error.message}"
    return error.message
