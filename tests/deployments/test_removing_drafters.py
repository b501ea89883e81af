"""`flotilla drafters remove` says what became of the drafter."""

from __future__ import annotations

import http.server
import json
import threading

import pytest
from typer.testing import CliRunner

from deployments import cli


def removed(states: list[str], *flags: str) -> str:
    """What is printed where the instances named were in these states when they were to be removed."""
    instances = [
        {
            "name": f"a/{number}",
            "kind": "a",
            "state": state,
            "load": 0,
            "max_requests": 8,
            "restarts": 0,
            "recovery_s": None,
            "node": "",
            "costs": "",
            "waits_for": "",
        }
        for number, state in enumerate(states)
    ]

    class Admin(http.server.BaseHTTPRequestHandler):
        def do_DELETE(self) -> None:
            self.send_response(202)
            self.end_headers()
            self.wfile.write(json.dumps({"object": "list", "data": instances}).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Admin) as server:
        answering = threading.Thread(target=server.handle_request)
        answering.start()
        url = f"http://127.0.0.1:{server.server_port}"
        result = CliRunner().invoke(cli.app, ["drafters", "remove", "a", *flags, "--url", url])
        answering.join()
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("state", ["loading", "restarting"])
def test_one_that_serves_nobody_yet_is_gone(state: str) -> None:
    assert removed([state]) == "a is gone\n"


def test_one_that_serves_is_draining() -> None:
    shown = removed(["draining", "loading"])
    assert shown.startswith("a is draining\n")
    assert "a/0" in shown
    assert "a/1" not in shown


def test_without_draining_it_is_gone_at_once() -> None:
    assert removed(["draining"], "--no-drain") == "a is gone\n"
