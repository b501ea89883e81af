"""What the API promises, over HTTP and with the official client, of a real model with real drafters."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.deployments.bad_requests import bad_requests
from tests.deployments.test_bad_requests import check_refusal
from tests.system.conftest import Server

PROMPT = "def read_lines(path):\n    "
#: The demo model stops in the middle of free strings when its tokens run out; these are short.
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]


def client_of(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="unused")


def check_forced_calls(server: Server) -> None:
    """A forced call keeps to its schema, is the same without speculation, and the same in a stream."""
    client = client_of(server)
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        request: Any = {
            "model": server.model,
            "messages": QUESTION,
            "tools": TOOLS,
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "seed": 7,
            "max_tokens": 64,
        }
        whole = client.chat.completions.create(**request)
        (call,) = whole.choices[0].message.tool_calls
        schema = WEATHER if call.function.name == "get_weather" else {"maxProperties": 0}
        jsonschema.validate(json.loads(call.function.arguments), schema)
        plain = client.chat.completions.create(**request, extra_body={"speculation": {"mode": "off"}})
        assert plain.choices[0].message.tool_calls[0].function == call.function
        name, arguments = "", ""
        for chunk in client.chat.completions.create(**request, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
                name += delta.function.name or ""
                arguments += delta.function.arguments or ""
        assert (name, arguments) == (call.function.name, call.function.arguments)


def check_responses(server: Server) -> None:
    """/v1/responses says what a chat says, whole and streamed."""
    client = client_of(server)
    chat = client.chat.completions.create(
        model=server.model, messages=QUESTION, temperature=0, max_completion_tokens=24
    )
    request: Any = {
        "model": server.model,
        "input": QUESTION[0]["content"],
        "temperature": 0,
        "max_output_tokens": 24,
    }
    assert client.responses.create(**request).output_text == chat.choices[0].message.content
    events = list(client.responses.create(**request, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    final = events[-1].response
    assert "".join(deltas) == final.output_text == chat.choices[0].message.content
    assert len(deltas) > 1
    formatted = client.responses.create(
        model=server.model,
        input="Weather?",
        max_output_tokens=64,
        text={"format": {"type": "json_schema", "name": "weather", "schema": WEATHER, "strict": True}},
    )
    jsonschema.validate(json.loads(formatted.output_text), WEATHER)


def check_messages(server: Server) -> None:
    """/v1/messages says what a chat says, whole and streamed."""
    chat = client_of(server).chat.completions.create(
        model=server.model, messages=QUESTION, temperature=0, max_completion_tokens=24
    )
    client = Anthropic(base_url=server.url, api_key="unused")
    request: Any = {
        "model": server.model,
        "messages": QUESTION,
        "max_tokens": 24,
        "extra_body": {"temperature": 0},
    }
    assert client.messages.create(**request).content[0].text == chat.choices[0].message.content
    with client.messages.stream(**request) as stream:
        texts = list(stream.text_stream)
    assert "".join(texts) == chat.choices[0].message.content
    assert len(texts) > 1


def check_prompt_logprobs(server: Server) -> None:
    """What a prompt's tokens are said to be worth is what they were worth when they were generated."""
    made = server.complete(PROMPT, max_tokens=12, logprobs=1, return_token_ids=True, ignore_eos=True)
    choice = made["choices"][0]
    scored = server.complete(
        [*choice["prompt_token_ids"], *choice["token_ids"]], max_tokens=0, echo=True, logprobs=1
    )
    assert scored["usage"]["completion_tokens"] == 0
    values = scored["choices"][0]["logprobs"]["token_logprobs"]
    assert values[0] is None
    assert values[-12:] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-3)
    shown = server.complete(PROMPT, max_tokens=1, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert [next(iter(entry.values()))["logprob"] for entry in shown[1:]] == pytest.approx(
        values[1 : len(shown)], abs=1e-3
    )


def check_ruled_out_tokens(server: Server) -> None:
    """Barred tokens never come, and the text is the same without speculation."""
    free = server.complete(PROMPT, return_token_ids=True)["choices"][0]
    allowed = sorted(set(free["token_ids"]) - {free["token_ids"][1]})
    word = server.post("/detokenize", {"tokens": free["token_ids"][2:4]}).json()["prompt"]
    for fields in ({"allowed_token_ids": allowed}, {"bad_words": [word]}):
        for temperature in (0, 0.8):
            asked: Any = {**fields, "temperature": temperature, "seed": 3, "return_token_ids": True}
            got = server.complete(PROMPT, **asked)["choices"][0]
            plain = server.complete(PROMPT, **asked, speculation={"mode": "off"})["choices"][0]
            assert got["token_ids"] == plain["token_ids"]
            if "allowed_token_ids" in fields:
                assert set(got["token_ids"]) <= set(allowed)
            else:
                assert got["text"] != free["text"]


def check_tokenize(server: Server) -> None:
    """The tokens told are those that are read."""
    counted = server.post("/tokenize", {"prompt": PROMPT}).json()
    read = server.complete(PROMPT, max_tokens=1, return_token_ids=True)
    assert counted["tokens"] == read["choices"][0]["prompt_token_ids"]
    assert counted["count"] == read["usage"]["prompt_tokens"]
    counted = server.post("/tokenize", {"messages": QUESTION, "tools": TOOLS}).json()
    body = {"messages": QUESTION, "tools": TOOLS, "max_tokens": 1, "return_token_ids": True}
    assert server.post("/v1/chat/completions", body).json()["prompt_token_ids"] == counted["tokens"]


def check_bad_requests(server: Server, every: int) -> None:
    """Of more than a thousand bad requests each so many-th, refused by name, leaves the server as it was."""
    before = server.complete(PROMPT)["choices"][0]["text"]
    bad_ones = list(bad_requests())
    assert len(bad_ones) > 1000
    headers = {"Content-Type": "application/json"}
    with httpx.Client(base_url=server.url, timeout=60, headers=headers) as http:
        for bad in bad_ones[::every]:
            check_refusal(bad, http.post(bad.path, content=bad.body))
        assert http.get("/health").status_code == 200
        assert http.get("/ready").status_code == 200
    assert server.complete(PROMPT)["choices"][0]["text"] == before
