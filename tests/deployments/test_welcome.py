"""The lines that `flotilla serve` prints once it serves."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from deployments.welcome import CHAT_URL, chat_command, first_request, has_chat_template
from zoo.registry import TARGET, weights_dir


def body(line: str) -> dict[str, object]:
    words = shlex.split(line)
    return dict(json.loads(words[words.index("-d") + 1]))


def test_a_model_without_a_chat_template_is_asked_to_go_on_with_a_prompt() -> None:
    """The line was refused by the server that had printed it."""
    line = first_request("http://a:1", "it's base", chats=False, wants_key=False)
    assert line.startswith("curl http://a:1/v1/completions ")
    assert body(line) == {
        "model": "it's base",
        "prompt": "import os\n",
        "max_tokens": 32,
        "slo": {"tpot_ms": 20},
    }
    line = first_request("http://a:1", "m", chats=True, wants_key=True)
    assert line.startswith("curl http://a:1/v1/chat/completions ")
    assert "Authorization: Bearer $FLOTILLA_API_KEY" in line
    assert "messages" in body(line)
    line = first_request("https://a:1", "m", chats=True, wants_key=False, wants_certificate=True)
    assert line.startswith("curl --cert client.crt --key client.key https://a:1/v1/chat/completions ")


@pytest.mark.parametrize(
    ("file", "text", "chats"),
    [
        ("chat_template.jinja", "{{ messages }}", True),
        ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}', True),
        ("tokenizer_config.json", '{"chat_template": null}', False),
        ("tokenizer_config.json", "[]", False),
        ("config.json", "{}", False),
        ("chat_template.json", '{"chat_template": "{{ messages }}"}', False),  # of processors alone
    ],
)
def test_where_a_chat_template_is(file: str, text: str, chats: bool, tmp_path: Path) -> None:
    (tmp_path / file).write_text(text)
    assert has_chat_template(tmp_path) is chats
    assert has_chat_template(weights_dir(TARGET))


def test_the_chat_command_reaches_this_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another port than the usual, and where only `make` has installed it."""
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/flotilla")
    assert chat_command(CHAT_URL) == "flotilla chat"
    assert chat_command("http://127.0.0.1:9000") == "flotilla chat --url http://127.0.0.1:9000"
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(sys, "argv", [".venv/bin/flotilla", "serve"])
    assert chat_command(CHAT_URL) == ".venv/bin/flotilla chat"
    monkeypatch.setattr(sys, "argv", ["/src/deployments/cli.py", "serve"])
    monkeypatch.setattr(sys, "executable", "/a b/python")
    assert chat_command(CHAT_URL) == "'/a b/python' -m deployments.cli chat"
