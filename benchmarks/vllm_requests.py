"""Requests of `flotilla bench vllm answers`: what clients of vLLM send, by field, right and wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.vllm_chat_requests import CHATS, HELLO, TOOL
from benchmarks.vllm_completion_requests import COMPLETIONS, PROMPT, SCHEMA
from benchmarks.vllm_peer import ADAPTER_NAME

FLAT_TOOL = {"type": "function", **TOOL["function"]}


@dataclass(frozen=True, slots=True)
class Question:
    """One request.

    Attributes:
        name: what is asked, in a few words; unique.
        method, path: of the request.
        body: as JSON, or bytes sent as they are; None for none.
        headers: besides those of JSON.
    """

    name: str
    method: str
    path: str
    body: Mapping[str, Any] | bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()


_RESPONSES: dict[str, dict[str, Any]] = {
    "text": {},
    "instructions": {"instructions": "Be brief."},
    "messages": {"input": [{"role": "user", "content": "Hello"}]},
    "typed messages": {
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    },
    "stream": {"stream": True},
    "a named tool": {
        "tools": [FLAT_TOOL],
        "tool_choice": {"type": "function", "name": "look"},
        "max_output_tokens": 96,
    },
    "a schema": {
        "text": {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA}},
        "max_output_tokens": 64,
    },
    "log-probabilities": {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
    "an earlier response": {"previous_response_id": "resp_nothing"},
    "no input": {"input": None},
    "in the background": {"background": True, "store": False},
    "another model": {"model": "nonsense"},
    "a LoRA adapter": {"model": ADAPTER_NAME},
}

_MESSAGES: dict[str, dict[str, Any]] = {
    "text": {},
    "system": {"system": "Be brief."},
    "blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
    "stop_sequences": {"stop_sequences": ["a"]},
    "stream": {"stream": True},
    "a named tool": {
        "tools": [{"name": "look", "description": "Look.", "input_schema": TOOL["function"]["parameters"]}],
        "tool_choice": {"type": "tool", "name": "look"},
        "max_tokens": 96,
    },
    "a named tool, as a stream": {
        "tools": [{"name": "look", "description": "Look.", "input_schema": TOOL["function"]["parameters"]}],
        "tool_choice": {"type": "tool", "name": "look"},
        "max_tokens": 96,
        "stream": True,
    },
    "max_tokens left out": {"max_tokens": None},
    "no messages": {"messages": []},
    "another model": {"model": "nonsense"},
    "a LoRA adapter": {"model": ADAPTER_NAME},
}

_JSON = (("Content-Type", "application/json"),)
_OTHERS = (
    Question("models", "GET", "/v1/models"),
    Question("one model", "GET", "/v1/models/demo"),
    Question("another model", "GET", "/v1/models/nonsense"),
    Question("health", "GET", "/health"),
    Question("ping", "GET", "/ping"),
    Question("ping by POST", "POST", "/ping"),
    Question("load", "GET", "/load"),
    Question("version", "GET", "/version"),
    Question("tokenize", "POST", "/tokenize", {"model": "demo", "prompt": PROMPT}),
    Question(
        "tokenize with text",
        "POST",
        "/tokenize",
        {"model": "demo", "prompt": PROMPT, "return_token_strs": True},
    ),
    Question("tokenize a chat", "POST", "/tokenize", {"model": "demo", "messages": HELLO}),
    Question("tokenize nothing", "POST", "/tokenize", {"model": "demo"}),
    Question("tokenize for a LoRA adapter", "POST", "/tokenize", {"model": ADAPTER_NAME, "prompt": "a"}),
    Question("tokenize for another model", "POST", "/tokenize", {"model": "nonsense", "prompt": "a"}),
    Question("detokenize", "POST", "/detokenize", {"model": "demo", "tokens": [100, 200, 300]}),
    Question("detokenize beyond", "POST", "/detokenize", {"model": "demo", "tokens": [99999999]}),
    Question("detokenize no ids", "POST", "/detokenize", {"model": "demo", "tokens": ["a"]}),
    Question("tokenizer_info", "GET", "/tokenizer_info"),
    Question("embeddings", "POST", "/v1/embeddings", {"model": "demo", "input": "a"}),
    Question("score", "POST", "/v1/score", {"model": "demo", "text_1": "a", "text_2": "b"}),
    Question("render a chat", "POST", "/v1/chat/completions/render", {"model": "demo", "messages": HELLO}),
    Question("render a completion", "POST", "/v1/completions/render", {"model": "demo", "prompt": PROMPT}),
    Question("nothing there", "GET", "/v1/nothing"),
    Question("GET of completions", "GET", "/v1/completions"),
    Question("no body", "POST", "/v1/completions", b"", _JSON),
    Question("body that is no JSON", "POST", "/v1/completions", b"{", _JSON),
    Question("body that is a list", "POST", "/v1/completions", b"[]", _JSON),
    Question("body that is no UTF-8", "POST", "/v1/chat/completions", b'{"model": "\xff"}', _JSON),
    Question(
        "body of another type",
        "POST",
        "/v1/completions",
        b'{"model": "demo", "prompt": "a", "max_tokens": 1, "temperature": 0}',
        (("Content-Type", "text/plain"),),
    ),
    Question(
        "body of no type",
        "POST",
        "/v1/completions",
        b'{"model": "demo", "prompt": "a", "max_tokens": 1, "temperature": 0}',
    ),
    Question(
        "count_tokens",
        "POST",
        "/v1/messages/count_tokens",
        {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]},
    ),
)


def questions(model: str) -> Iterator[Question]:
    """Every request, greedy unless it says otherwise."""
    hello = {"model": model, "messages": HELLO, "max_tokens": 8, "temperature": 0}
    groups: tuple[tuple[str, str, dict[str, Any], dict[str, dict[str, Any]]], ...] = (
        (
            "completion",
            "/v1/completions",
            {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0},
            COMPLETIONS,
        ),
        ("chat", "/v1/chat/completions", hello, CHATS),
        (
            "response",
            "/v1/responses",
            {"model": model, "input": "Tell me about the sea.", "max_output_tokens": 8, "temperature": 0},
            _RESPONSES,
        ),
        ("message", "/v1/messages", hello, _MESSAGES),
    )
    for group, path, base, variants in groups:
        for name, fields in variants.items():
            body = {key: value for key, value in (base | fields).items() if value is not None}
            yield Question(f"{group}: {name}", "POST", path, body)
    yield from _OTHERS
