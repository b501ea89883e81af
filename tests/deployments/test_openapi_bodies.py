"""Bodies that the server takes are valid by /openapi.json, and those it refuses are not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from deployments.openai_schema import NEUTRAL_VALUES
from deployments.responses_schema import RESPONSES_NEUTRAL
from tests.deployments.bad_requests import BASES, bad_requests
from tests.deployments.conftest import shared_app
from tests.deployments.test_api_fields import GUIDELLM, PARTS, VLLM_BENCH
from tests.deployments.test_structured_fields import ACCEPTED, SCHEMA
from tests.fakes.cell_stand_in import CellStandIn

ROOT = Path(__file__).parents[2]
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def documented() -> list[tuple[str, dict[str, Any]]]:
    """Bodies of the commands in the documents."""
    found = []
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for path, body in re.findall(
            r"curl [^\n]*?(/v1/[a-z/]+)(?:[^'\n\\]|\\\n|'[^']*')*?-d '([^']*)'", file.read_text()
        ):
            found.append((path, json.loads(body)))
    return found


VALID: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, VLLM_BENCH),
    (COMPLETIONS, GUIDELLM),
    (COMPLETIONS, {"prompt": ["a", [5, 6]], "stop": "x"}),
    (COMPLETIONS, {"prompt": [5, 6], "stop": ["x", "y"], "logit_bias": {"17": -3}, "bad_words": ["x"]}),
    (COMPLETIONS, {"prompt": "a", "stop": None, "logit_bias": None, "bad_words": None}),
    (COMPLETIONS, {"prompt": "a", "slo": {"tpot_ms": "1.2x", "ttft_ms": 500.5}, "seed": 3, "best_of": 2}),
    (CHAT, {"messages": PARTS, "stream": True, "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 3}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL], "tool_choice": "auto"}),
    (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "b", "tool_call_id": "c"},
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
        },
    ),
    (RESPONSES, {"input": "a", "instructions": "b", "text": {"format": {"type": "text"}}}),
    (
        RESPONSES,
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
            "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}],
            "tool_choice": {"type": "function", "name": "look"},
        },
    ),
    (
        RESPONSES,
        {
            "input": "a",
            "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "look"}],
            },
        },
    ),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]}),
    ("/detokenize", {"tokens": [5]}),
    *((path, BASES[path] | fields) for path in (COMPLETIONS, CHAT) for fields, _ in ACCEPTED),
    *BASES.items(),
    *((path, body | {"suffix": one}) for path, body in BASES.items() for one in NEUTRAL_VALUES["suffix"]),
    *((path, body | {"length_penalty": 1.0}) for path, body in BASES.items()),
    *((RESPONSES, {"input": "a", name: one}) for name, values in RESPONSES_NEUTRAL.items() for one in values),
]  # fmt: skip

INVALID: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {}),
    (COMPLETIONS, {"prompt": []}),
    (COMPLETIONS, {"prompt": [5, "a"]}),
    (COMPLETIONS, {"prompt": {"text": "a"}}),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 17}),
    (COMPLETIONS, {"prompt": "a", "bad_words": "x"}),
    (COMPLETIONS, {"prompt": "a", "bad_words": [" "]}),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"17": 101}}),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": 0}),
    (COMPLETIONS, {"prompt": "a", "guided_json": 5}),
    (COMPLETIONS, {"prompt": "a", "slo": {"tpot_ms": "fast"}}),
    (COMPLETIONS, {"prompt": "a", "slo": {"tpot_ms": 0}}),
    (COMPLETIONS, {"prompt": "a", "temprature": 1}),
    (CHAT, {"messages": "a"}),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    (CHAT, {"messages": [{"role": "robot", "content": "a"}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "refusal", "text": "a"}]}]}),
    (CHAT, {"messages": [{"role": "assistant", "content": "a", "function_call": {"name": "b"}}]}),
    (RESPONSES, {"input": 5}),
    (RESPONSES, {"input": []}),
    (RESPONSES, {"input": "a", "tool_choice": 7}),
    (RESPONSES, {"input": "a", "background": True}),
    ("/tokenize", {"prompt": ["a"]}),
    ("/detokenize", {"tokens": "a"}),
]


@pytest.fixture(scope="module")
def schemas() -> dict[str, Draft202012Validator]:
    found = {}
    paths = shared_app().openapi()["paths"]
    for path in BASES:
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        Draft202012Validator.check_schema(schema)
        found[path] = Draft202012Validator(schema)
    return found


async def test_what_is_answered_is_valid(
    http: httpx.AsyncClient, cell: CellStandIn, schemas: dict[str, Draft202012Validator]
) -> None:
    cell.max_tokens = 2048
    for path, body in VALID:
        response = await http.post(path, json=body)
        assert response.status_code == 200, (path, body, response.text)
        schemas[path].validate(body)


def test_commands_of_the_documents_are_valid(schemas: dict[str, Draft202012Validator]) -> None:
    bodies = documented()
    assert len(bodies) >= 5
    for path, body in bodies:
        schemas[path].validate(body)


async def test_what_is_invalid_is_refused(
    http: httpx.AsyncClient, schemas: dict[str, Draft202012Validator]
) -> None:
    for path, body in INVALID:
        assert not schemas[path].is_valid(body), (path, body)
        assert (await http.post(path, json=body)).status_code == 400, (path, body)


@pytest.mark.parametrize("usual", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_bad_requests_are_invalid(schemas: dict[str, Draft202012Validator], usual: bool) -> None:
    """All whose fields are wrong by themselves."""
    for bad in bad_requests():
        # A seed is off by one where numbers of JSON schemas, being floats, are a thousand apart.
        if bad.usual == usual and bad.field not in (None, "seed"):
            assert not schemas[bad.path].is_valid(json.loads(bad.body)), bad
