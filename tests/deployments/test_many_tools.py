"""Agents with several servers of the Model Context Protocol send hundreds of tools, at each API."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from deployments.api_service import ApiService
from deployments.openai_api import create_app
from tests.fakes.cell_stand_in import CellStandIn

NO_ARGUMENTS = {"type": "object", "properties": {}}
MESSAGES = [{"role": "user", "content": "hello"}]


def function(name: str) -> dict[str, Any]:
    return {"name": name, "parameters": NO_ARGUMENTS}


def bodies(num_tools: int) -> dict[str, dict[str, Any]]:
    """A request of each API, by its path."""
    names = [f"tool_{number}" for number in range(num_tools)]
    return {
        "/v1/chat/completions": {
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": function(name)} for name in names],
        },
        "/v1/responses": {
            "input": "hello",
            "tools": [{"type": "function"} | function(name) for name in names],
        },
        "/v1/messages": {
            "messages": MESSAGES,
            "max_tokens": 8,
            "tools": [{"name": name, "input_schema": NO_ARGUMENTS} for name in names],
        },
    }


def grouped(num_tools: int) -> dict[str, Any]:
    """The same in a namespace."""
    body = bodies(num_tools)["/v1/responses"]
    return body | {"tools": [{"type": "namespace", "name": "mcp", "tools": body["tools"]}]}


@pytest.mark.api("chat.completions", "tools")
@pytest.mark.api("responses", "tools")
@pytest.mark.api("messages", "tools")
async def test_a_thousand_tools_are_taken(service: ApiService, cell: CellStandIn) -> None:
    cell.max_tokens = 1 << 20
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://cell") as http:
        for path, body in (*bodies(1024).items(), ("/v1/responses", grouped(1024))):
            response = await http.post(path, json=body)
            assert response.status_code == 200, response.text
        for path, body in (*bodies(1025).items(), ("/v1/responses", grouped(1025))):
            response = await http.post(path, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "tools"
