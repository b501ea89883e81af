"""What is kept of a request that is answered with an error: a line in the log that says why, and a count.

Of what the client sent, neither holds more than the name of the field at fault.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from deployments.errors import ApiError
from deployments.messages_errors import messages_error, speaks_messages
from deployments.request_context import RequestContext, current_request

_log = logging.getLogger(__name__)

#: What fields are called. Clients choose the names of unknown ones: what looks otherwise may be a text.
_FIELD = re.compile(r"[A-Za-z0-9_.\-\[\]]{1,100}")


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """The response that ends the request at hand, which remembers why."""
    request = current_request()
    if request is not None:
        request.error = error
    return error.response(headers, error_body(error, request))


def error_body(error: ApiError, request: RequestContext | None) -> dict[str, Any]:
    """What the client of a request is told, in the form of the API that it speaks."""
    if request is not None and speaks_messages(request.path):
        return messages_error(error, request.request_id)
    return error.body()


def log_refusal(error: ApiError, **fields: Any) -> None:
    """One line for a request that was not answered, unless it has one (`deployments.request_log`)."""
    if error.is_logged:
        return
    error.is_logged = True
    said: dict[str, Any] = {"code": code_of(error), **fields}
    if error.param is not None:
        said["param"] = error.param if _FIELD.fullmatch(error.param) else "(no name of a field)"
    _log.info("refused", extra={"fields": said})


def code_of(error: ApiError) -> str:
    """What it is called where it is counted; there are as many as the code names, whatever clients send."""
    return error.code or str(error.status)
