"""Which requests vLLM is compared by, what is read of answers, and that every difference has a reason."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.answer_differences import Difference
from benchmarks.vllm_answers import Answer, ask, differences, reasons
from benchmarks.vllm_known_differences import KNOWN, explained
from benchmarks.vllm_requests import Question, questions

DOCS = Path(__file__).resolve().parents[2] / "docs"


class Echo(BaseHTTPRequestHandler):
    """Answers with what it was sent, in the form that the path asks for."""

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, kind = 200, "application/json"
        body = json.dumps({"sent": sent.decode(), "type": self.headers.get("Content-Type")}).encode()
        if self.path == "/stream":
            kind = "text/event-stream; charset=utf-8"
            chunk = {"choices": [{"index": 0, "text": "a"}]}
            event = f"data: {json.dumps(chunk)}\n\n"
            body = f": hello\n\n{event}{event}data: [DONE]\n\n".encode()
        elif self.path == "/refused":
            status = 422
        elif self.path == "/text":
            kind, body = "text/plain", b"well"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, format: str, *arguments: Any) -> None:
        return None


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_answers_are_read_as_what_they_are(url: str) -> None:
    assert ask(url, Question("", "POST", "/json", {"a": 1})) == Answer(
        200, {"sent": '{"a": 1}', "type": "application/json"}
    )
    raw = Question("", "POST", "/refused", b"{", (("Content-Type", "text/plain"),))
    assert ask(url, raw) == Answer(422, {"sent": "{", "type": "text/plain"})
    assert ask(url, Question("", "GET", "/text")) == Answer(200, "well")
    stream = ask(url, Question("", "POST", "/stream", {})).content
    assert stream["done"]
    assert stream["choices"] == [{"text": "aa"}]


def test_refusals_may_say_it_in_other_words() -> None:
    error = {"message": "no", "code": "a"}
    other = {"message": "never", "code": "b"}
    (found,) = differences(Answer(400, {"error": error}), Answer(400, {"error": other}))
    assert (found.where, found.kind) == ("error.code", "value")
    (found,) = differences(Answer(200, {"text": "a"}), Answer(400, {"error": other}))
    assert found.kind == "status"
    assert found.ours.startswith("200")
    assert found.theirs.startswith("400")


def test_every_request_has_a_name_of_its_own() -> None:
    asked = list(questions("it"))
    assert len({question.name for question in asked}) == len(asked)
    bodies = [question.body for question in asked if isinstance(question.body, dict)]
    assert all(None not in body.values() for body in bodies)


def test_a_difference_is_explained_only_where_its_reason_holds() -> None:
    receipt = Difference("metrics", "added", "{}", "")
    assert explained("chat: stop", receipt) == KNOWN[0].reason
    assert explained("chat: stop", Difference("metrics", "missing", "", "{}")) is None
    offset = Difference("choices[].logprobs.text_offset[]", "value", "0", "7")
    assert explained("completion: echo with logprobs", offset) is not None
    assert explained("chat: logprobs", offset) is None
    assert explained("chat: stop", Difference("choices[].message.content", "value", "a", "b")) is None


def test_the_page_says_what_was_found() -> None:
    """All reasons, and of how many answers each was in the record."""
    found = json.loads((DOCS / "results" / "vllm-answers.json").read_text())["answers"]
    assert [entry["request"] for entry in found] == [question.name for question in questions("demo")]
    for entry in found:
        for one in entry["differences"]:
            fields = {name: one[name] for name in ("where", "kind", "ours", "theirs")}
            assert one["reason"] == explained(entry["request"], Difference(**fields))
            assert one["reason"] is not None
    page = (DOCS / "migrating.md").read_text()
    rows = re.findall(r"^\| (.*) \| (\d+) \|$", page, re.MULTILINE)
    held = [[known.reason, str(sum(known.reason in reasons(entry) for entry in found))] for known in KNOWN]
    assert [list(row) for row in rows] == held
    assert f"{len(found)} requests" in page
