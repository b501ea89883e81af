"""How commands that ask a server one thing open the connection, by the standard library alone."""

from __future__ import annotations

import urllib.request
from http.client import HTTPMessage, HTTPResponse
from typing import IO, NoReturn, cast
from urllib.error import URLError

from deployments.client_tls import client_context


class _Staying(urllib.request.HTTPRedirectHandler):
    """Does not go where an answer sends it.

    What was to be changed would become a question there, whose answer looks as if it was done; and whoever
    is there would be sent the key.
    """

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> NoReturn:
        """See urllib."""
        raise URLError(f"it sends on to {newurl}; give the address behind it as --url")


def open_server(request: urllib.request.Request, timeout_s: float) -> HTTPResponse:
    """The server's answer, to be closed by the caller.

    Raises:
        HTTPError: for an answer that is an error.
        OSError, HTTPException, ValueError: there is none, it sends elsewhere, or its address is none.
    """
    opener = urllib.request.build_opener(_Staying, urllib.request.HTTPSHandler(context=client_context()))
    return cast(HTTPResponse, opener.open(request, timeout=timeout_s))
