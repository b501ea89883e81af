"""Names of calls on their way to a cell, from which a running request is found again."""

from __future__ import annotations

import hashlib
import re
import uuid

_DIGITS = 16
#: Request ids a client may choose; anything else could forge log lines or headers.
REQUEST_ID = r"[A-Za-z0-9._:~-]{1,128}"


def is_request_id(asked: str) -> bool:
    """Whether a client may choose that id."""
    return re.fullmatch(REQUEST_ID, asked) is not None


def clean_request_id(asked: str) -> str:
    """The id a client chose, or a new one if it chose none that can be logged.

    For headers and metadata, which proxies set and which never are a reason to refuse a request.
    """
    return asked if is_request_id(asked) else f"req-{uuid.uuid4().hex}"


def call_prefix(request_id: str) -> str:
    """What the ids of all calls of that request id begin with: 16 hexadecimal digits.

    A digest, because request ids are chosen by clients and may hold anything, at any length.
    """
    return hashlib.sha256(request_id.encode()).hexdigest()[:_DIGITS]


def new_call_id(request_id: str, unique: str | None = None) -> str:
    """An id for one call: clients may send a request id twice, and the two are different requests.

    Args:
        request_id: as the client chose it, or was given.
        unique: tells this call from all others of the request id; random if None.
    """
    return call_prefix(request_id) + (unique or new_unique())


def new_unique() -> str:
    """16 random hexadecimal digits."""
    return uuid.uuid4().hex[:_DIGITS]
