"""`/tokenize` and `/detokenize` agree with what generation is given."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import msgspec
import pytest

from deployments.text_codec import TextCodec
from tests.deployments.test_api_tools import TOOLS
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import codec, ids

MESSAGES = [{"role": "user", "content": "the lazy dog"}, {"role": "assistant", "content": "naps"}]


async def tokenized(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await http.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


@pytest.mark.api("tokenize", "prompt", "add_special_tokens", "return_token_strs", "model")
@pytest.mark.api("detokenize", "tokens", "model")
async def test_there_and_back(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    text = "the café 🙂"
    plain = await tokenized(http, model="demo", prompt=text, add_special_tokens=False)
    assert plain == {
        "count": len(ids(text)),
        "max_model_len": cell.max_tokens,
        "tokens": ids(text),
        "token_strs": None,
    }
    whole = await tokenized(http, prompt=text, return_token_strs=True)
    assert whole["tokens"] == codec().encode(text)
    assert whole["token_strs"][0] == "<|bos|>"
    back = await http.post("/detokenize", json={"model": "demo", "tokens": whole["tokens"]})
    assert back.json() == {"prompt": "<|bos|>" + text}
    assert (await http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_what_the_tokenizer_is_configured_with(http: httpx.AsyncClient) -> None:
    response = await http.get("/tokenizer_info")
    assert response.status_code == 200
    told = response.json()
    assert told["bos_token"] == "<|bos|>", "as a text, and not as what a library calls a token"
    assert told["chat_template"] == codec().template
    assert not told.keys() & {"name_or_path", "vocab_file", "tokenizer_file"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"bos_token": "!"}},
        {"add_special_tokens": True},
        {"tools": TOOLS},
        {"reasoning_effort": "low"},
    ],
)
@pytest.mark.api(
    "tokenize",
    "messages",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "add_special_tokens",
    "tools",
)
async def test_a_conversation_is_tokenized_as_it_is_answered(
    http: httpx.AsyncClient, cell: CellStandIn, fields: dict[str, Any]
) -> None:
    cell.max_tokens = 2048
    counted = await tokenized(http, messages=MESSAGES, **fields)
    response = await http.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})
    assert response.status_code == 200, response.text
    assert counted["tokens"] == cell.submissions[0].prompt


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": TOOLS}, "tools"),
        ("/tokenize", {"prompt": "a", "reasoning_effort": "low"}, "reasoning_effort"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages.0.content"),
        ("/tokenize", {"prompt": "a", "model": "gpt-9"}, "model"),
        ("/tokenize", {"prompt": "a", "stream": True}, "stream"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [100_000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": 5}, "model"),
    ],
)
@pytest.mark.api("tokenize", "prompt", "messages", "tools", "model")
@pytest.mark.api("detokenize", "tokens", "model")
async def test_bad_requests_are_named(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    response = await http.post(path, json=body)
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("num", [5, 9000])
@pytest.mark.parametrize(
    ("path", "name", "more"), [("/detokenize", "tokens", {}), ("/v1/completions", "prompt", {"echo": True})]
)
async def test_many_tokens_are_decoded_beside_the_event_loop(
    http: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    name: str,
    more: dict[str, Any],
    num: int,
) -> None:
    """As many as a body holds took a second, in which no stream went on."""
    threads: list[int] = []
    decode = TextCodec.decode

    def noted(self: TextCodec, ids: list[int], **options: bool) -> str:
        if len(ids) == num:
            threads.append(threading.get_ident())
        return decode(self, ids, **options)

    monkeypatch.setattr(TextCodec, "decode", noted)
    await http.post(path, content=msgspec.json.encode({name: [9] * num} | more))
    assert [one != threading.get_ident() for one in threads] == [num > 8192]
