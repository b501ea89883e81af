"""What `flotilla serve` prints once it serves: lines that can be pasted as they are."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from cluster.config import FlotillaConfig
from cluster.log_files import shown_logs
from cluster.model_paths import model_directory
from deployments.api_keys import wants_keys

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


def first_request(
    url: str, model: str, *, chats: bool, wants_key: bool, wants_certificate: bool = False
) -> str:
    """A `curl` for a first answer."""
    slo = {"tpot_ms": 20}
    messages = [{"role": "user", "content": "What does `json.dumps` do?"}]
    what: dict[str, Any] = {"messages": messages} if chats else {"prompt": "import os\n", "max_tokens": 32}
    path = "/v1/chat/completions" if chats else "/v1/completions"
    key = ' -H "Authorization: Bearer $FLOTILLA_API_KEY"' if wants_key else ""
    certificate = " --cert client.crt --key client.key" if wants_certificate else ""
    body = json.dumps({"model": model, **what, "slo": slo})
    return f"curl{certificate} {url}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"


def chat_command(url: str) -> str:
    """How a chat with this server is begun, from a shell that need not find what `make` installed."""
    if shutil.which("flotilla"):
        program = "flotilla"
    elif sys.argv[0].endswith(".py"):  # by `python -m`, of which only the file is told
        program = f"{shlex.quote(sys.executable)} -m deployments.cli"
    else:
        program = shlex.quote(sys.argv[0])
    return f"{program} chat" if url == CHAT_URL else f"{program} chat --url {url}"


def print_welcome(console: Console, config: FlotillaConfig, url: str, description: Mapping[str, Any]) -> None:
    """What is served where, and what to try; a cell is described as by `Cell.describe`."""
    model = description["model"]
    adapters = [adapter.name for adapter in config.target.adapters]
    served = f", adapters {', '.join(adapters)}" if adapters else ""
    drafters = ", ".join(description["drafters"]) or "no drafters"
    console.print(
        f"\n[bold]{escape(model)}[/] with {escape(drafters + served)}, "
        f"policy {config.policy.name}, on [bold]{escape(url)}[/]\nTry:\n",
        soft_wrap=True,
    )
    chats = has_chat_template(model_directory(config.target.path))
    # Not through rich's wrapping: the line is there to be copied.
    request = first_request(
        url,
        model,
        chats=chats,
        wants_key=wants_keys(config.security),
        wants_certificate=config.http.tls_client_ca is not None,
    )
    print(f"{request}\n", flush=True)
    chat = f"or `{chat_command(url)}`; " if chats and config.http.tls_client_ca is None else ""
    for line in (
        f"{chat}Ctrl-C stops",
        f"Logs: {shown_logs(config.log)} (warnings and errors of this machine also here)",
    ):
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
