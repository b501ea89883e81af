"""What commands that ask a server say where they cannot."""

from __future__ import annotations

import aiohttp

#: Of addresses that are none; as text they are the address and nothing else.
NO_ADDRESS = (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError)

# After these a request is sent on as a GET, and what that brings would be taken for its answer.
_MOVED = (301, 302, 303)


def moved(response: aiohttp.ClientResponse, path: str) -> str | None:
    """What to say of an answer that is to a GET elsewhere instead of the request; None if it is not.

    Args:
        path: what was appended to the server's address.
    """
    if not any(hop.status in _MOVED for hop in response.history):
        return None
    there = str(response.url)
    return f"sends on to {there}: give the address behind it, as in --url {there.removesuffix(path)}"


def reason(error: Exception) -> str:
    """Why a request could not be sent, or its answer not be read."""
    if isinstance(error, NO_ADDRESS):
        return "that is no address of a server, such as http://127.0.0.1:8000"
    # aiohttp speaks of `ssl:default` also where there is none.
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.strerror or str(error)
    return str(error) or type(error).__name__
