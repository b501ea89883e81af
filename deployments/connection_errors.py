"""What commands that ask a server say where they cannot."""

from __future__ import annotations

import aiohttp

#: Of addresses that are none; as text they are the address and nothing else.
NO_ADDRESS = (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError)


def reason(error: Exception) -> str:
    """Why a request could not be sent, or its answer not be read."""
    if isinstance(error, NO_ADDRESS):
        return "that is no address of a server, such as http://127.0.0.1:8000"
    # aiohttp speaks of `ssl:default` also where there is none.
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.strerror or str(error)
    return str(error) or type(error).__name__
