"""A call that the client forces relies on no form that the model has learnt."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.deployments.test_api_tools import FORCED, MESSAGES, NAMED, TOOLS
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import codec, ids

CITY = '{"city": "Oslo"}'


@pytest.fixture
def tool_parser() -> str:
    return "none"


@pytest.mark.parametrize(("choice", "written"), [("required", FORCED), (NAMED, CITY)])
@pytest.mark.api("chat.completions", "tool_choice")
async def test_a_template_without_a_place_for_tools_is_told_them_in_words(
    choice: Any, written: str, http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    """It was refused, with the advice to force a call by `tool_choice`."""
    cell.max_tokens = 2048  # tools told in words are long
    cell.script = lambda submit: [*ids(written), *codec().eos_ids]
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    (call,) = response.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": CITY}
    (submit,) = cell.submissions
    assert "Weather of a city." in codec().decode(submit.prompt)
    constraint = submit.sampling.constraint
    assert constraint is not None
    assert "city" in json.dumps(json.loads(constraint.text))
