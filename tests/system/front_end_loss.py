"""A front end killed in the midst of a stream: the next one continues it at the client's last event."""

from __future__ import annotations

import json
import os
import signal
import time

import httpx

from tests.own_processes import own_processes
from tests.system.conftest import Server

STREAM = {"prompt": "def merge(left, right):\n", "max_tokens": 200, "ignore_eos": True, "stream": True}


class NotReady(Exception):
    """The front end answered 503."""


def check_a_stream_goes_on(server: Server) -> None:
    """Who takes over never heard of the request, and generates the very same text from its key."""
    key = {"Idempotency-Key": "killed"}
    first = _events(server, key, kill_after=20)
    assert 20 <= len(first) < 150, "killed too late to show anything"
    headers = key | {"Last-Event-ID": first[-1].partition("\n")[0].removeprefix("id: ")}
    rest: list[str] = []
    deadline = time.monotonic() + 60
    while not rest:
        assert time.monotonic() < deadline, "no front end took its place"
        try:
            rest = _events(server, headers)
        except (httpx.TransportError, NotReady):
            time.sleep(0.2)
    assert rest[-1].endswith("data: [DONE]\n")
    whole = _events(server, key)
    assert _told(first + rest) == _told(whole)
    assert len(whole) > 150


def _events(server: Server, headers: dict[str, str], kill_after: int | None = None) -> list[str]:
    """The events of a stream, until it ends or, after so many, its front end is killed."""
    events: list[str] = []
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", f"{server.url}/v1/completions", json=STREAM, headers=headers) as response,
    ):
        if response.status_code == 503:  # it has not heard of its cells yet, and says when to come back
            assert float(response.headers["retry-after"]) > 0
            raise NotReady
        assert response.status_code == 200, response.read()
        lines: list[str] = []
        try:
            for line in response.iter_lines():
                lines.append(line)
                if not line:
                    events.append("\n".join(lines))
                    lines = []
                    if len(events) == kill_after:
                        os.kill(_front_end_pid(), signal.SIGKILL)
        except httpx.HTTPError:
            assert kill_after is not None
    return events


def _front_end_pid() -> int:
    (pid,) = own_processes("ray::ServeReplica:flotilla:FrontEnd")
    return pid


def _told(events: list[str]) -> list[tuple[str, str]]:
    """Position and text of each event."""
    found = []
    for event in events:
        position, _, data = event.partition("\n")
        body = json.loads(data.removeprefix("data: ")) if "{" in data else {"choices": []}
        found.append((position, "".join(choice["text"] for choice in body["choices"])))
    return found
