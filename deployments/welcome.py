"""What `flotilla serve` prints once it serves: lines that can be pasted as they are."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

#: Where `flotilla chat` asks unless told otherwise.
CHAT_URL = "http://127.0.0.1:8000"


def has_chat_template(directory: Path) -> bool:
    """Whether the tokenizer in a Hugging Face directory renders conversations; base models' do not."""
    if (directory / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads((directory / "tokenizer_config.json").read_text()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def first_request(url: str, model: str, *, chats: bool, wants_key: bool) -> str:
    """A `curl` for a first answer."""
    slo = {"tpot_ms": 20}
    messages = [{"role": "user", "content": "What does `json.dumps` do?"}]
    what: dict[str, Any] = {"messages": messages} if chats else {"prompt": "import os\n", "max_tokens": 32}
    path = "/v1/chat/completions" if chats else "/v1/completions"
    key = ' -H "Authorization: Bearer $FLOTILLA_API_KEY"' if wants_key else ""
    body = json.dumps({"model": model, **what, "slo": slo})
    return f"curl {url}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"


def chat_command(url: str) -> str:
    """How a chat with this server is begun, from a shell that need not find what `make` installed."""
    if shutil.which("flotilla"):
        program = "flotilla"
    elif sys.argv[0].endswith(".py"):  # by `python -m`, of which only the file is told
        program = f"{shlex.quote(sys.executable)} -m deployments.cli"
    else:
        program = shlex.quote(sys.argv[0])
    return f"{program} chat" if url == CHAT_URL else f"{program} chat --url {url}"
