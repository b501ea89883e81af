"""Variables of the chat template that would make much of a small body."""

from __future__ import annotations

import copy
import threading
from typing import Any

import httpx
import pytest

from deployments import prompt_preparation
from deployments.api_service import ApiService
from deployments.openai_api import create_app
from deployments.text_codec import TextCodec
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import codec, tokenizer

TEMPLATE = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
HELLO = {"role": "user", "content": "hello"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture
def made() -> TextCodec:
    own = copy.deepcopy(tokenizer())
    own.chat_template = TEMPLATE
    return TextCodec(own, codec().eos_ids)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    "messages",
    [
        [HELLO] * 100,
        [
            HELLO,
            {
                "role": "assistant",
                "tool_calls": [CALL] * 99,
            },
        ],
    ],
    ids=["messages", "calls"],
)
async def test_no_variable_is_written_without_end(
    cell: CellStandIn, made: TextCodec, path: str, messages: list[dict[str, Any]]
) -> None:
    """Most templates write `eos_token` with each message: 4 MB of it, 4,096 times, would be 16 GB."""
    service = ApiService(cell, made)
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://cell") as http:
        body = {"messages": messages, "chat_template_kwargs": {"eos_token": "a" * 50_000}}
        answer = await http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs"
    await service.close()


async def test_long_variables_are_tokenized_in_a_thread(
    cell: CellStandIn, made: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three megabytes of one held every other request and stream of the front end up for seconds."""
    threads: list[threading.Thread] = []
    encode = TextCodec.encode

    def noted(self: TextCodec, text: str, *, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.current_thread())
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(TextCodec, "encode", noted)
    service = ApiService(cell, made)
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://cell") as http:
        long = "a" * (prompt_preparation.INLINE_CHARS + 1)
        for variables in ({"eos_token": long}, {"eos_token": "a"}):
            body = {"messages": [HELLO], "chat_template_kwargs": variables}
            assert (await http.post("/tokenize", json=body)).status_code == 200
    assert [thread is threading.main_thread() for thread in threads[-2:]] == [False, True]
    await service.close()
