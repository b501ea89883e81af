"""Keys that may ask for some of the service tiers only are told of no others."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from tests.deployments.test_authentication import KEYS, app, authenticator, bearer, clock

__all__ = ["app", "authenticator", "clock"]  # fixtures

assert KEYS["fast"]  # may ask for the tier `fast`, and so not for the default one


@pytest.mark.parametrize(("path", "field"), [("/v1/tiers", "data"), ("/console/state", "tiers")])
async def test_a_key_is_told_of_the_tiers_it_may_ask_for(app: FastAPI, path: str, field: str) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        for key, seen in (("plain", ["default", "fast"]), ("fast", ["fast"]), ("plain", ["default", "fast"])):
            body = (await http.get(path, headers=bearer(key))).json()
            assert [tier["id"] for tier in body[field]] == seen
