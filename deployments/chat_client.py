"""Terminal chat with any OpenAI-compatible server; shows Flotilla's receipt where there is one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp.http import HttpProcessingError
from rich.console import Console
from rich.text import Text

from deployments.api_keys import KEY_SENT, client_headers
from deployments.client_tls import client_context
from deployments.connection_errors import NO_ADDRESS, moved, reason
from deployments.server_url import server_root

_HELP = "[dim]/new starts over, /quit leaves[/]"
_UNREADABLE = "what the server streams is no chat"
_MOST_SHOWN = 200


class ServerError(Exception):
    """The server refused or failed; the message is its own."""


@dataclass(frozen=True)
class ChatOptions:
    """What is sent with every turn."""

    url: str
    model: str | None = None
    system: str | None = None
    temperature: float = 0.7
    max_tokens: int | None = None
    slo: dict[str, float] = field(default_factory=dict)
    tier: str | None = None
    seed: int | None = None

    def body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """The request for the next answer."""
        body: dict[str, Any] = {"messages": messages, "temperature": self.temperature, "stream": True}
        optional = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "slo": self.slo,
            "service_tier": self.tier,
        }
        return body | {name: value for name, value in optional.items() if value not in (None, {})}


def run_chat(options: ChatOptions, console: Console | None = None) -> int:
    """Chat until the user leaves; returns the exit status."""
    console = console or Console(highlight=False)
    try:
        # A line is awaited outside of the event loop: there Ctrl-C would wait for the end of the line.
        with asyncio.Runner() as runner:
            session = runner.run(_session())
            try:
                return _chat(options, console, session, runner)
            finally:
                runner.run(session.close())
    except KeyboardInterrupt:
        return 0


async def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    connector = aiohttp.TCPConnector(ssl=client_context())
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=client_headers())


def _chat(
    options: ChatOptions, console: Console, session: aiohttp.ClientSession, runner: asyncio.Runner
) -> int:
    start = [{"role": "system", "content": sendable(options.system)}] if options.system else []
    messages = list(start)
    console.print(_HELP)
    if options.model is None:
        # Other servers insist on a model; ours would not.
        options = ChatOptions(**{**vars(options), "model": runner.run(_first_model(session, options.url))})
    while True:
        try:
            line = sendable(console.input("[bold]> [/]")).strip()
        except EOFError:
            return 0
        if line == "/quit":
            return 0
        if line == "/new":
            messages = list(start)
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = runner.run(_turn(session, options, messages, console))
        except (ServerError, aiohttp.ClientError) as error:
            told = str(error)
            if isinstance(error, (aiohttp.ClientConnectorError, *NO_ADDRESS)):
                told = f"cannot reach {options.url}: {reason(error)}"
            console.print(Text(told, style="red"))
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


def sendable(text: str) -> str:
    """A text as JSON can hold it: bytes of a terminal that are no UTF-8 come as halves of surrogate pairs."""
    return text.encode(errors="replace").decode()


async def _turn(
    session: aiohttp.ClientSession, options: ChatOptions, messages: list[dict[str, str]], console: Console
) -> str:
    pieces: list[str] = []
    thinks = False
    receipt: dict[str, Any] | None = None
    async for chunk in stream_chat(session, options.url, options.body(messages)):
        receipt = chunk.get("metrics", receipt)
        for thought, text in _texts(chunk):
            pieces.append(text)
            console.out(thought, end="", highlight=False, style="dim")
            if text and thinks:
                console.print("\n")
            thinks = not text and (thinks or bool(thought))
            # Not markup: brackets in an answer are text.
            console.out(text, end="", highlight=False)
    console.print()
    if isinstance(receipt, dict):
        console.print(Text(describe_receipt(receipt), style="dim"))
    return "".join(pieces)


def _texts(chunk: dict[str, Any]) -> list[tuple[str, str]]:
    """What a chunk adds to the thoughts and to the answer, by choice; vLLM says `reasoning` of thoughts."""
    try:
        deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or ()]
        return [
            (
                str(delta.get("reasoning_content") or delta.get("reasoning") or ""),
                str(delta.get("content") or ""),
            )
            for delta in deltas
        ]
    except (AttributeError, TypeError):
        raise ServerError(f"{_UNREADABLE}: {chunk}"[:_MOST_SHOWN]) from None


async def stream_chat(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a streamed answer; raises `ServerError` also where the stream breaks off or is none."""
    path = "/v1/chat/completions"
    async with session.post(f"{server_root(url)}{path}", json=body) as response:
        if (elsewhere := moved(response, path)) is not None:
            raise ServerError(f"{url} {elsewhere}")
        if response.status != 200:
            told = (
                _error_message((await response.read()).decode(errors="replace"))
                or f"HTTP status {response.status}"
            )
            raise ServerError(told + (f" {KEY_SENT}" if response.status == 401 else ""))
        try:
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                yield _chunk(data)
        except (HttpProcessingError, ValueError) as error:  # a line that is too long: aiohttp 3.14, before
            raise ServerError(f"{_UNREADABLE}: {error}"[:_MOST_SHOWN]) from None
    raise ServerError("the server broke off the stream")


def _chunk(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        chunk = None
    if not isinstance(chunk, dict):
        raise ServerError(f"{_UNREADABLE}: {data[:_MOST_SHOWN].decode(errors='replace')}")
    error = chunk.get("error")
    if error:
        raise ServerError(str(error.get("message", error) if isinstance(error, dict) else error))
    return chunk


async def _first_model(session: aiohttp.ClientSession, url: str) -> str | None:
    try:
        async with session.get(f"{server_root(url)}/v1/models") as response:
            models = (await response.json())["data"]
            return str(models[0]["id"]) if models else None
    except (aiohttp.ClientError, ValueError, KeyError, TypeError):
        return None


def describe_receipt(metrics: dict[str, Any]) -> str:
    """One line about how an answer came about."""
    parts = []
    if metrics.get("time_to_first_token_ms") is not None:
        parts.append(f"first token {metrics['time_to_first_token_ms']:.0f} ms")
    if metrics.get("tpot_ms") is not None:
        parts.append(f"{metrics['tpot_ms']:.1f} ms/token")
    spec = metrics.get("speculative_decoding") or {}
    if spec.get("mean_acceptance_length") is not None:
        drafted, accepted = spec.get("num_draft_tokens", 0), spec.get("num_accepted_draft_tokens", 0)
        drafts = f"{accepted} of {drafted} drafted accepted" if drafted else "none drafted"
        parts.append(f"{spec['mean_acceptance_length']:.2f} tokens/step ({drafts})")
    drafters = metrics.get("drafters") or {}
    if drafters:
        parts.append(", ".join(f"{name} {count}" for name, count in sorted(drafters.items())))
    met = (metrics.get("slo") or {}).get("met")
    if met is not None:
        parts.append("objective met" if met else "objective missed")
    if metrics.get("seed") is not None:
        parts.append(f"seed {metrics['seed']}")
    return " · ".join(parts)


def _error_message(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200]
