"""What asks for nothing that could change an answer is passed over, whichever API it is sent to."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from typing import Any, get_args

import httpx
import pytest
from openai.types.responses import ResponseIncludable

from tests.fakes.cell_stand_in import CellStandIn

MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "seed": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "seed": 1},
    "/v1/responses": {"input": "hello", "seed": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8, "seed": 1},
}
everywhere = pytest.mark.parametrize("path", BODIES)
HINTS = [
    {"prompt_cache_retention": "24h"},
    {"prompt_cache_options": {"ttl": "30m"}},
    {"prediction": {"type": "content", "content": "hello"}},
]


@everywhere
@pytest.mark.parametrize("hint", HINTS)
@pytest.mark.api("completions", "prompt_cache_retention", "prompt_cache_options", "prediction")
@pytest.mark.api("chat.completions", "prompt_cache_retention", "prompt_cache_options", "prediction")
@pytest.mark.api("responses", "prompt_cache_retention", "prompt_cache_options", "prediction")
@pytest.mark.api("messages", "prompt_cache_retention", "prompt_cache_options", "prediction")
async def test_hints_for_speed_change_nothing(
    http: httpx.AsyncClient, cell: CellStandIn, path: str, hint: dict[str, Any]
) -> None:
    for body in (BODIES[path], BODIES[path] | hint):
        response = await http.post(path, json=body)
        assert response.status_code == 200, response.text
    plain, hinted = cell.submissions
    assert (hinted.prompt, hinted.sampling) == (plain.prompt, plain.sampling)
    (name,) = hint
    response = await http.post(path, json=BODIES[path] | {name: 5})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("name", get_args(ResponseIncludable))
@pytest.mark.api("responses", "include")
async def test_whatever_openai_can_include_may_be_asked_for(
    http: httpx.AsyncClient, cell: CellStandIn, name: str
) -> None:
    """Most is of tools that this server does not run, and of which an answer has nothing."""
    body = BODIES["/v1/responses"] | {"tools": [{"type": "web_search"}]}
    outputs = []
    for fields in ({}, {"include": [name]}):
        response = await http.post("/v1/responses", json=body | fields)
        assert response.status_code == 200, response.text
        (item,) = response.json()["output"]
        outputs.append([part | {"logprobs": []} for part in item["content"]])
    assert outputs[0] == outputs[1]
    plain, included = cell.submissions
    assert (included.sampling == plain.sampling) == (name != "message.output_text.logprobs")


@everywhere
async def test_a_byte_order_mark_is_no_part_of_a_body(http: httpx.AsyncClient, path: str) -> None:
    body = json.dumps(BODIES[path]).encode()
    assert (await http.post(path, content=BOM_UTF8 + body)).status_code == 200
    twice = await http.post(path, content=2 * BOM_UTF8 + body)
    assert (twice.status_code, twice.json()["error"]["code"]) == (400, "invalid_json")
