"""What asks for nothing that could change an answer is passed over, whichever API it is sent to."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

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
