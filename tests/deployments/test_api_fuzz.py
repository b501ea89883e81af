"""Hundreds of malformed bodies: always a 4xx that names the field, never a 5xx, and the server stays well."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from deployments.openai_schema import ChatRequest, CompletionRequest
from tests.examples import examples
from tests.fakes.cell_stand_in import CellStandIn

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(st.characters(), max_size=12)
    | st.sampled_from(["user", "auto", "a", "1e5", 1e308]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields, "best_of", "tools", "nonsense"})
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}
_count = itertools.count()
HTTP_SETTINGS = examples(300, suppress_health_check=[HealthCheck.function_scoped_fixture])


async def post(http: httpx.AsyncClient, path: str, body: bytes) -> httpx.Response:
    response = await http.post(path, content=body)
    assert response.status_code < 500, (body, response.text)
    if response.status_code != 200:
        assert response.status_code in (400, 404, 413), (body, response.text)
        error = response.json()["error"]
        assert error["message"]
        if error["code"] != "invalid_json":
            assert error["param"], (body, error)
            assert error["param"].partition(".")[0] in error["message"]
    return response


@HTTP_SETTINGS
@given(st.sampled_from(sorted(VALID)), st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3))
async def test_wrong_values(
    http: httpx.AsyncClient, cell: CellStandIn, path: str, fields: dict[str, Any]
) -> None:
    await post(http, path, json.dumps(VALID[path] | fields).encode("utf-8", "surrogatepass"))
    if next(_count) % 10 == 0:
        await check_alive(http)


@HTTP_SETTINGS
@given(st.sampled_from(sorted(VALID)), st.binary(max_size=40), st.integers(0, 60))
async def test_wrong_bytes(http: httpx.AsyncClient, path: str, noise: bytes, at: int) -> None:
    body = json.dumps(VALID[path]).encode()
    await post(http, path, body[:at] + noise + body[at + len(noise) :])
    if next(_count) % 10 == 0:
        await check_alive(http)


async def check_alive(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json=VALID["/v1/completions"])
    assert response.status_code == 200
    assert response.json()["choices"][0]["text"]
