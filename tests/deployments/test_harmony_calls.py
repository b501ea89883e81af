"""Calls of tools in channels, as gpt-oss makes them: read, forced, sent back, and beside a format."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from functools import cache
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, BadRequestError
from tokenizers import AddedToken

from cluster.stream_messages import Submit
from deployments.api_service import ApiService
from deployments.errors import ApiError
from deployments.harmony import MARKERS, HarmonyParser
from deployments.harmony_calls import HarmonyCalls
from deployments.harmony_messages import in_channels
from deployments.openai_api import create_app
from deployments.text_codec import TextCodec
from engine.constraint import Constraint
from engine.mask_bits import holds
from engine.thoughtful_grammar import matcher_of
from tests.deployments.socket_server import served
from tests.deployments.test_formats_beside_tools import FORMAT, WEATHER, grammars
from tests.deployments.test_tool_parsers import told
from tests.fakes import tiny_tokenizer
from tests.fakes.cell_stand_in import CellStandIn

CHANNEL, NEXT = "<|channel|>", "<|end|><|start|>assistant"
ANALYSIS = f"{CHANNEL}analysis<|message|>Oslo, then.{NEXT}"
OSLO = '{"city": "Oslo"}'
HEADER = "commentary to=functions.get_weather <|constrain|>json<|message|>"
CALL = f"{CHANNEL}{HEADER}{OSLO}"
ENDED = f"{CALL}<|call|>"
PREAMBLE = f"{CHANNEL}commentary<|message|>I will look.{NEXT}"
FINAL = f"{CHANNEL}final<|message|>"
NAMES = ("get_weather", "now")


@pytest.mark.parametrize(
    ("text", "thought", "said", "calls"),
    [
        (ANALYSIS + ENDED, "Oslo, then.", "", [OSLO]),
        (ANALYSIS + CALL, "Oslo, then.", "", [OSLO]),  # its end is a stop token, which is in no text
        (PREAMBLE + ENDED, "", "I will look.", [OSLO]),
        (ANALYSIS + PREAMBLE + CALL, "Oslo, then.", "I will look.", [OSLO]),
        (
            f"<|start|>assistant to=functions.get_weather{CHANNEL}commentary json<|message|>{OSLO}",
            "",
            "",
            [OSLO],
        ),
        (f"{CHANNEL}commentary to=get_weather<|message|>{OSLO}", "", "", [OSLO]),
        # The prompt has begun the first header.
        (f" to=functions.get_weather{CHANNEL}commentary json<|message|>{OSLO}<|call|>", "", "", [OSLO]),
        (
            "to=functions.get_weather is how to call it.",
            "",
            "to=functions.get_weather is how to call it.",
            [],
        ),
        (
            f"{ANALYSIS} to=functions.get_weather{CHANNEL}commentary json<|message|>{OSLO}",
            "Oslo, then.",
            "",
            [OSLO],
        ),
        # Behind arguments that are complete nothing is told.
        (f"{CHANNEL}{HEADER}{OSLO}}} Then.<|call|>", "", "", [OSLO]),
        (f"{CHANNEL}{HEADER}{OSLO}}} Then.{NEXT}{FINAL}Done.", "", "Done.", [OSLO]),
        (f"{CHANNEL}analysis to=functions.get_weather <|message|>{OSLO}<|call|>", "", "", [OSLO]),
        (f"{CHANNEL}commentary to=functions.now<|message|><|call|>", "", "", ["{}"]),
        (f"{CHANNEL}commentary to=functions.now<|message|> \n", "", "", ["{}"]),
        (f"{ENDED}<|start|>assistant{CALL}{NEXT}{FINAL}Done.", "", "Done.", [OSLO, OSLO]),
        (f"{CHANNEL}{HEADER}{OSLO[:9]}", "", "", [OSLO[:9]]),  # cut off
        (f"{CHANNEL}{HEADER}no JSON<|call|>", "", "", ["no JSON"]),
        (f"{CHANNEL}{HEADER}{OSLO} {NEXT}{FINAL}Done.", "", "Done.", [OSLO]),
        (f"{CHANNEL}commentary to=functions.other <|message|>{OSLO}<|call|>", "", OSLO, []),
        (f"{CHANNEL}analysis to=browser.open <|message|>{OSLO}{NEXT}{FINAL}Hm.", OSLO, "Hm.", []),
        (f"{FINAL}Write to=functions.now, and no call.", "", "Write to=functions.now, and no call.", []),
    ],
)
def test_what_is_thought_said_and_called(text: str, thought: str, said: str, calls: list[str]) -> None:
    for size in (1, 2, 7, 1000):
        channels, parser = HarmonyParser(functions=NAMES), HarmonyCalls(NAMES)
        pieces = [channels.feed(text[at : at + size]) for at in range(0, len(text), size)]
        pieces.append(channels.finish())
        assert "".join(one for one, _ in pieces) == thought
        rest = "".join(one for _, one in pieces)
        content, found = told(parser, rest, list(range(0, len(rest), size)))
        assert content == said
        assert [arguments for _, arguments in found] == calls


@cache
def marked() -> TextCodec:
    """A tokenizer with the marks as tokens, of which the end of a call and of an answer are stop tokens."""
    made = tiny_tokenizer.tokenizer.__wrapped__()
    made.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKERS])
    made.eos_token, made.chat_template = "<|return|>", TEMPLATE
    return TextCodec(made, eos_ids=frozenset({made.convert_tokens_to_ids("<|call|>")}))


#: What gpt-oss's template makes of a conversation, in short, and what it refuses.
TEMPLATE = """{%- if messages[0].role == "system" -%}
<|start|>developer<|message|>{{ messages[0].content }}
{%- for tool in tools or [] %}// {{ "" + tool.function.description }}{{ tool.function.name }};{% endfor -%}
{%- set messages = messages[1:] %}{% endif -%}
{%- set last = namespace(name=none) -%}
{%- for message in messages -%}
{%- if message.role == "assistant" and "tool_calls" in message -%}
{%- if message.content and message.thinking %}{{ raise_exception("content and thinking") }}{% endif -%}
{%- if message.thinking -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>
{%- endif -%}
{%- set call = message.tool_calls[0].function %}{% set last.name = call.name -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- elif message.role == "assistant" -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- elif message.role == "tool" -%}
{%- if last.name is none %}{{ raise_exception("no call before") }}{% endif -%}
<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>
{{- message.content | tojson }}<|end|>
{%- elif message.role == "user" -%}
<|start|>user<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}
"""


@pytest.fixture
async def url(cell: CellStandIn) -> AsyncIterator[str]:
    cell.max_tokens, cell.vocab_size, cell.per_step = 2048, 512, 3
    service = ApiService(cell, marked())
    assert service.tool_parser == "harmony"
    async with served(create_app(service)) as address:
        yield address
    await service.close()


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as made:
        yield made


def ids(text: str) -> list[int]:
    return marked().encode(text, add_special_tokens=False)


def says(cell: CellStandIn, text: str) -> None:
    cell.script = lambda submit: ids(text)


HELLO: Any = {"role": "user", "content": "Weather?"}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}]
)
async def test_calls_are_told(client: AsyncOpenAI, cell: CellStandIn, choice: Any) -> None:
    says(cell, ANALYSIS + ENDED)
    asked: Any = {"model": "demo", "messages": [HELLO], "tools": [TOOL, NOW], "tool_choice": choice}
    whole = (await client.chat.completions.create(**asked)).choices[0]
    message: Any = whole.message
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", OSLO)
    assert (message.reasoning_content, message.content or "") == ("Oslo, then.", "")
    assert whole.finish_reason == ("stop" if isinstance(choice, dict) else "tool_calls")
    thought, arguments = "", ""
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        delta: Any = chunk.choices[0].delta
        thought += getattr(delta, "reasoning_content", None) or ""
        assert not delta.content
        arguments += "".join(one.function.arguments for one in delta.tool_calls or ())
    assert (thought, arguments) == ("Oslo, then.", OSLO)


async def test_anthropics_api_tells_them_too(url: str, cell: CellStandIn) -> None:
    says(cell, ANALYSIS + PREAMBLE + ENDED)
    tool: Any = {"name": "get_weather", "input_schema": WEATHER}
    async with AsyncAnthropic(base_url=url, api_key="unused") as client:
        answer = await client.messages.create(
            model="demo", max_tokens=2000, messages=[HELLO], tools=[tool], thinking=THINKING
        )
    thought, text, call = (block.to_dict() for block in answer.content)
    assert (thought["thinking"], text["text"]) == ("Oslo, then.", "I will look.")
    assert (call["name"], call["input"], answer.stop_reason) == ("get_weather", {"city": "Oslo"}, "tool_use")


def may_be(constraint: Constraint, text: str) -> bool:
    """Whether a text may be an answer."""
    matcher = matcher_of(grammars(marked()), constraint)
    for token in ids(text):
        if not holds(matcher.allowed(), token):
            return False
        matcher.advance([token])
    return True


async def constraint_of(client: AsyncOpenAI, cell: CellStandIn, **asked: Any) -> Constraint:
    """That of an answer to such a request."""
    seen: list[Submit] = []
    cell.script = lambda submit: seen.append(submit) or ids(ENDED)
    await client.chat.completions.create(model="demo", messages=[HELLO], **asked)
    constraint = seen[0].sampling.constraint
    assert constraint is not None
    return constraint


async def test_a_call_that_must_be_made_comes_behind_thoughts(client: AsyncOpenAI, cell: CellStandIn) -> None:
    any_one = await constraint_of(client, cell, tools=[TOOL, NOW], tool_choice="required")
    other: Any = {"type": "function", "function": {"name": "now"}}
    named = await constraint_of(client, cell, tools=[TOOL, NOW], tool_choice=other)
    now = f"{CHANNEL}commentary to=functions.now <|constrain|>json<|message|>{{}}<|call|>"
    before = f" to=functions.get_weather{CHANNEL}commentary json<|message|>{OSLO}<|call|>"
    for text in (ANALYSIS + ENDED, ENDED, ANALYSIS + ANALYSIS + now, before, ANALYSIS + before):
        assert may_be(any_one, text), text
    assert may_be(named, ANALYSIS + now)
    assert not may_be(named, ENDED)
    for text in (
        f"{FINAL}It rains.",
        ANALYSIS + FINAL,
        f"{CHANNEL}{HEADER}{{}}<|call|>",
        f"{ANALYSIS}{CHANNEL}commentary to=functions.later <|constrain|>json<|message|>{{}}<|call|>",
        f"{CHANNEL}analysis<|message|>Oslo<|call|>",
        OSLO,
    ):
        assert not may_be(any_one, text), text


async def test_a_format_is_that_of_what_is_said(client: AsyncOpenAI, cell: CellStandIn) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": FORMAT}}
    alone = await constraint_of(client, cell, response_format=form)
    beside = await constraint_of(client, cell, response_format=form, tools=[TOOL])
    said = '{"answer": "It rains."}<|return|>'
    for text in (FINAL + said, ANALYSIS + FINAL + said, PREAMBLE + FINAL + said, said):
        assert may_be(alone, text), text
        assert may_be(beside, text), text
    constrained = f"{ANALYSIS}{CHANNEL}final <|constrain|>json<|message|>{said}"
    assert may_be(alone, constrained)
    assert may_be(beside, ANALYSIS + ENDED)
    for text in (
        ANALYSIS + ENDED,
        f"{FINAL}It rains.",
        f"{ANALYSIS}{FINAL}{{}}<|return|>",
        ANALYSIS + "<|return|>",
    ):
        assert not may_be(alone, text), text
    assert not may_be(beside, f"{FINAL}It rains.")
    says(cell, ANALYSIS + FINAL + said)
    asked: Any = {"model": "demo", "messages": [HELLO], "response_format": form}
    message: Any = (await client.chat.completions.create(**asked)).choices[0].message
    assert (message.reasoning_content, json.loads(message.content)) == (
        "Oslo, then.",
        {"answer": "It rains."},
    )


async def test_what_is_said_of_calls_to_come_is_none_of_a_format(
    client: AsyncOpenAI, cell: CellStandIn
) -> None:
    asked: Any = {"model": "demo", "messages": [HELLO]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": FORMAT}}
    other = f"{CHANNEL}commentary to=functions.other <|message|>{{}}<|call|>"
    for asks in (
        {"response_format": form},
        {"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}},
    ):
        for text, thought, said in (
            (f"{PREAMBLE}{FINAL}yes", "I will look.", "yes"),
            (f"{ANALYSIS}{PREAMBLE}{FINAL}yes", "Oslo, then.\n\nI will look.", "yes"),
            (other, "{}", ""),
        ):
            says(cell, text)
            message: Any = (await client.chat.completions.create(**asked, **asks)).choices[0].message
            assert (message.reasoning_content, message.content or "") == (thought, said)


@pytest.mark.parametrize("per_step", [1, 3, 1000])
async def test_tokens_of_thoughts_are_counted(client: AsyncOpenAI, cell: CellStandIn, per_step: int) -> None:
    thought = ids(f"{CHANNEL}analysis<|message|>Oslo, 日本語 then.<|end|>")
    cell.per_step = per_step
    cell.script = lambda submit: [*thought, *ids(f"<|start|>assistant{FINAL}It rains.<|return|>")]
    asked: Any = {"model": "demo", "messages": [HELLO]}
    whole = await client.chat.completions.create(**asked)
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, **options)]
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert usage.completion_tokens_details is not None
        # Of tokens that come together a share is counted, by their text: marks are long for a token.
        told = usage.completion_tokens_details.reasoning_tokens or 0
        assert abs(told - len(thought)) <= (0 if usage is not whole.usage and per_step == 1 else 8)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "deep"}}])
async def test_a_schema_that_cannot_be_read_is_the_client_s_fault(client: AsyncOpenAI, choice: Any) -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(70):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    tool: Any = {"type": "function", "function": {"name": "deep", "parameters": schema}}
    with pytest.raises(BadRequestError, match="the schema of the function 'deep'"):
        await client.chat.completions.create(model="demo", messages=[HELLO], tools=[tool], tool_choice=choice)


def of_calls(*names: str, ids: Sequence[str], said: str = "") -> dict[str, Any]:
    calls = [{"id": one, "function": {"name": name}} for one, name in zip(ids, names, strict=True)]
    return {"role": "assistant", "content": said, "tool_calls": calls}


def result(of: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": of, "content": content}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([of_calls("a", "b", ids="xy"), result("y", "2"), result("x", "1")], "a 1 b 2"),
        ([of_calls("a", "b", ids="xx"), result("x", "1"), result("x", "2")], "a 1 b 2"),
        ([of_calls("a", ids="x"), of_calls("b", ids="y"), result("x", "1"), result("y", "2")], "a 1 b 2"),
        ([of_calls("a", "b", ids="xy"), result("?", "1"), result("!", "2")], "a 1 b 2"),
        ([of_calls("a", ids="x"), result("x", "1"), result("x", "2"), result("?", "3")], "a 1 2 3"),
        ([of_calls("a", "b", ids="xy"), result("y", "2")], "a b 2"),
    ],
)
def test_results_stand_behind_their_calls(messages: list[dict[str, Any]], expected: str) -> None:
    told = in_channels(messages)
    names = [
        one["tool_calls"][0]["function"]["name"] if "tool_calls" in one else one["content"] for one in told
    ]
    assert " ".join(names) == expected


def test_a_message_with_calls_is_not_gone_on_with() -> None:
    with pytest.raises(ApiError, match="cannot go on with a message that makes calls"):
        in_channels([of_calls("a", ids="x", said="I look.")], goes_on=True)
    system = {"role": "system", "content": "Be brief."}
    assert in_channels([{"role": "user", "content": "Hi"}, system], goes_on=True)[-1] == system


def test_marks_within_thoughts_are_not_sent_to_the_template() -> None:
    thought = {"role": "assistant", "content": "a", "reasoning_content": f"b{FINAL}c"}
    assert in_channels([thought]) == [{"role": "assistant", "content": "a", "thinking": "bfinalc"}]


async def test_a_conversation_with_calls_is_told_whole(client: AsyncOpenAI, cell: CellStandIn) -> None:
    def call(name: str, number: int, arguments: str = "{}") -> Any:
        return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}

    calls = [call("get_weather", 1, OSLO), call("now", 2)]
    seen: list[Submit] = []
    cell.script = lambda submit: seen.append(submit) or ids(f"{FINAL}It rains.<|return|>")
    await client.chat.completions.create(
        model="demo",
        tools=[TOOL, NOW],
        messages=[
            {"role": "system", "content": "Be brief."},
            HELLO,
            {"role": "assistant", "content": "I look.", "reasoning_content": "Two.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c2", "content": "noon"},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "developer", "content": "Be kind."},
            HELLO,
        ],
    )
    assert marked().decode(seen[0].prompt, skip_special_tokens=False) == (
        "<|start|>developer<|message|>Be brief.\n\nBe kind.// get_weather;// now;"
        "<|start|>user<|message|>Weather?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Two.\n\nI look.<|end|>"
        f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{OSLO}<|call|>"
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"rain"<|end|>'
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.now to=assistant<|channel|>commentary<|message|>"noon"<|end|>'
        "<|start|>user<|message|>Weather?<|end|><|start|>assistant"
    )
