"""A slash at the end of a path changes nothing, with keys and behind a proxy's prefix too."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.deployments.test_api_adapters import BODIES, COUNTS
from tests.deployments.test_authentication import app, authenticator, bearer, clock

__all__ = ["app", "authenticator", "clock"]  # fixtures


@pytest.mark.parametrize("path", BODIES | COUNTS)
async def test_it_is_the_same_endpoint(http: httpx.AsyncClient, path: str) -> None:
    """It was a redirect to `http://HOST/...`, whatever the client had asked."""
    answer = await http.post(f"{path}/", json=(BODIES | COUNTS)[path], headers=bearer("plain"))
    assert answer.status_code == 200, answer.text
    assert (await http.post(f"{path}/", json=(BODIES | COUNTS)[path])).status_code == 401


async def test_a_key_may_do_no_more(http: httpx.AsyncClient) -> None:
    for path in ("/metrics/", "/debug/workers/", "/admin/drafters/"):
        assert (await http.get(path)).status_code == 401
        assert (await http.get(path, headers=bearer("plain"))).status_code == 403


async def test_pages_and_what_is_not_there(http: httpx.AsyncClient) -> None:
    for path in ("/health/", "/ready/"):
        assert (await http.get(path)).status_code == 200
    page = await http.get("/console/")
    assert (page.status_code, page.headers["location"]) == (308, "../console")
    missing: dict[str, Any] = (await http.get("/v1/nothing/", headers=bearer("plain"))).json()
    assert missing["error"]["code"] == "not_found"
    root = await http.get("/", headers=bearer("plain"))
    assert root.status_code == 404
