"""Variables of the chat template that hold where a request names no others."""

from __future__ import annotations

import copy
from typing import Any

import httpx
import pytest

from deployments.api_service import ApiService
from deployments.openai_api import create_app
from deployments.text_codec import TextCodec
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import codec, ids, tokenizer

TEMPLATE = "{{ enable_thinking }} {{ reasoning_effort }} {{ messages[0].content }}"
HELLO = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "False low"),
        ({"reasoning_effort": "high"}, "True high"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "True low"),
        ({"chat_template_kwargs": {"reasoning_effort": None}}, "False None"),
    ],
)
async def test_a_request_counts_before_the_configuration(
    cell: CellStandIn, fields: dict[str, Any], told: str
) -> None:
    """Who serves a model that is not to think had to have every client say so."""
    own = copy.deepcopy(tokenizer())
    own.chat_template = TEMPLATE
    made = TextCodec(own, codec().eos_ids, {"enable_thinking": False, "reasoning_effort": "low"})
    service = ApiService(cell, made)
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://cell") as http:
        body = {"messages": [HELLO], "max_tokens": 9} | fields
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert list(cell.submissions[-1].prompt) == ids(f"{told} hello")
        counted = await http.post("/tokenize", json={"messages": [HELLO]} | fields)
        assert counted.json()["tokens"] == ids(f"{told} hello")
    await service.close()
