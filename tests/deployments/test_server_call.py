"""Commands whose address sends on to another, as a proxy does that knows HTTPS only."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from typer.testing import CliRunner

from deployments import cli
from deployments.chat_client import ServerError, stream_chat

ELSEWHERE = "https://elsewhere.test/admin"


class SendsOn(http.server.BaseHTTPRequestHandler):
    """Sends a request on to the list of drafters here, or to another machine."""

    status, location, asked = 301, "", list[str]()

    def do_POST(self) -> None:
        self.send_response(self.status)
        self.send_header("Location", self.location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.location == ELSEWHERE:
            self.do_POST()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"object": "list", "data": [], "traceEvents": []}')

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def handler() -> type[SendsOn]:
    return type("Handler", (SendsOn,), {"asked": []})


@pytest.fixture
def url(handler: type[SendsOn]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("status", [301, 302, 303, 307])
def test_a_drafter_that_was_not_added_does_not_look_as_if_it_was(
    url: str, handler: type[SendsOn], status: int
) -> None:
    handler.status, handler.location = status, "/admin/drafters"
    result = CliRunner().invoke(cli.app, ["drafters", "add", "--name", "a", "--path", "b", "--url", url])
    assert result.exit_code == 2, result.output
    assert f"it sends on to {url}/admin/drafters; give the address behind it" in " ".join(
        result.output.split()
    )
    assert handler.asked == []


async def test_a_chat_says_where_its_server_sends_on_to(url: str, handler: type[SendsOn]) -> None:
    handler.location = "/elsewhere/v1/chat/completions"
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ServerError, match=rf"sends on to {url}/elsewhere/v1/.* --url {url}/elsewhere$"):
            async for _ in stream_chat(session, url, {}):
                pass


@pytest.mark.parametrize("command", [["drafters", "list"], ["timeline", "-o"]])
def test_a_key_is_not_sent_where_an_answer_points(
    url: str, handler: type[SendsOn], command: list[str], tmp_path: Path
) -> None:
    handler.location = ELSEWHERE
    arguments = [*command, str(tmp_path / "trace.json")] if command[-1] == "-o" else command
    result = CliRunner().invoke(cli.app, [*arguments, "--url", url])
    assert result.exit_code == 2
    assert f"it sends on to {ELSEWHERE};" in " ".join(result.output.split())
    assert len(handler.asked) == 1
