"""`flotilla timeline`: who worked when on a running server, fetched as a trace."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

import typer

from deployments.api_keys import client_headers
from deployments.server_call import open_server
from deployments.server_url import server_root

_TIMEOUT_S = 60.0


class TimelineFailed(Exception):
    """There is no trace to be had; the message says why."""


def fetch_timeline(url: str, output: Path) -> None:
    """Write the server's timeline to a file.

    Raises:
        TimelineFailed: the server is not there, keeps none, or the file cannot be written.
    """
    try:
        request = urllib.request.Request(f"{server_root(url)}/debug/timeline", headers=client_headers())
        with open_server(request, _TIMEOUT_S) as answer:
            trace = answer.read()
    except urllib.error.HTTPError as error:
        raise TimelineFailed(_message(error)) from None
    except (OSError, ValueError) as error:
        raise TimelineFailed(f"cannot reach {url}: {getattr(error, 'reason', error)}") from None
    except HTTPException as error:  # another protocol, or an answer that breaks off
        raise TimelineFailed(f"cannot reach {url}: {error!r}") from None
    try:
        num_slices = sum(event["ph"] == "X" for event in json.loads(trace)["traceEvents"])
    except (ValueError, KeyError, TypeError):
        raise TimelineFailed(f"{url} answers as no Flotilla server does; is it another one's?") from None
    try:
        output.write_bytes(trace)
    except OSError as error:
        raise TimelineFailed(f"cannot write {output}: {error.strerror}") from None
    typer.echo(f"Wrote {num_slices} slices to {output}; open it in https://ui.perfetto.dev")


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code}"
