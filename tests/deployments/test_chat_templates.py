"""What chat templates of different habits are given of a conversation."""

from __future__ import annotations

import copy
import threading
from typing import Any

import httpx
import pytest

from deployments.api_service import ApiService
from deployments.openai_api import create_app
from deployments.text_codec import TextCodec
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import codec, ids, tokenizer

PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
#: As those of models that also take pictures.
PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
REASONED = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}{% endfor %}"
)


def codec_of(template: str) -> TextCodec:
    own = copy.deepcopy(tokenizer())
    own.chat_template = template
    return TextCodec(own)


async def prompt_of(template: str, messages: list[dict[str, Any]], **fields: Any) -> list[int]:
    """What the model is given of the conversation."""
    cell = CellStandIn(lambda submit: [*ids("yes"), *codec_of(template).eos_ids])
    service = ApiService(cell, codec_of(template), give_up_after_s=1.5)
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://cell") as http:
        body = {"messages": messages, "max_tokens": 9, **fields}
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
    await service.close()
    await cell.close()
    return list(cell.submissions[0].prompt)


@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning"])
async def test_a_thought_reaches_templates_by_either_name(sent: str, read: str) -> None:
    """Solar Open's reads `reasoning` alone, and lost all thoughts."""
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes", sent: "hm hm"},
        {"role": "user", "content": "so?"},
    ]
    template = REASONED.replace("m.reasoning_content", f"m.{read}")
    prompt = codec().decode(await prompt_of(template, messages), skip_special_tokens=False)
    assert prompt.count("(hm hm)yes") == 1


@pytest.mark.parametrize("template", [PLAIN, PARTS, EITHER])
@pytest.mark.parametrize("text", ["the café", [{"type": "text", "text": "the café"}]])
async def test_a_text_reaches_the_model_in_either_form(template: str, text: Any) -> None:
    """A template that goes over parts was given a string, of which it wrote nothing."""
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": None},
        {"role": "user", "content": " a"},
    ]
    assert await prompt_of(template, messages) == ids("<|user|>the café<|assistant|><|user|> a")
    assert codec_of(template).reads_parts == (template == PARTS)


@pytest.mark.parametrize("knows_tools", [False, True])
async def test_a_template_that_reads_reasons_is_given_them(knows_tools: bool) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "the", "reasoning_content": "and"},
    ]
    template = ("{% if tools %}{{ tools }}{% endif %}" if knows_tools else "") + REASONED
    assert await prompt_of(template, messages) == ids("<|user|>a<|assistant|>(and)the")


def test_a_template_that_refuses_everything_reads_no_parts() -> None:
    assert not codec_of("{{ raise_exception('no') }}").reads_parts
    assert not codec_of("").reads_parts


USER = {"role": "user", "content": "a"}
SYSTEM = {"role": "system", "content": "b"}
DEVELOPER = {"role": "developer", "content": "c"}
SAID = [USER, {"role": "assistant", "content": "d"}]
FIRST = "<|bos|><|system|>{}<|end|><|user|>a<|end|>"
OPEN = "<|assistant|>"


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        # As Codex and Claude Code begin.
        ("responses", {"instructions": "i", "input": [DEVELOPER, USER]}, FIRST.format("i\n\nc") + OPEN),
        ("messages", {"system": "i", "messages": [USER, SYSTEM]}, FIRST.format("i\n\nb") + OPEN),
        ("chat/completions", {"messages": [SYSTEM, USER, DEVELOPER]}, FIRST.format("b\n\nc") + OPEN),
        (
            "messages",
            {"messages": [USER, SYSTEM, *SAID[1:]]},
            FIRST.format("b") + "<|assistant|>d",
        ),
        (
            "chat/completions",
            {"messages": [SYSTEM, *SAID]},
            FIRST.format("b") + "<|assistant|>d<|end|>" + OPEN,
        ),
    ],
)
@pytest.mark.api("responses", "instructions")
async def test_what_systems_say_later_comes_first_where_a_template_knows_no_other_place(
    http: httpx.AsyncClient, cell: CellStandIn, path: str, body: dict[str, Any], told: str
) -> None:
    response = await http.post(f"/v1/{path}", json=body | ({"max_tokens": 9} if path == "messages" else {}))
    assert response.status_code == 200, response.text
    assert codec().decode(cell.submissions[0].prompt, skip_special_tokens=False) == told


async def test_systems_speak_where_they_do_if_the_template_lets_them() -> None:
    prompt = await prompt_of(PLAIN, [SYSTEM, USER, DEVELOPER, USER])
    assert codec().decode(prompt, skip_special_tokens=False) == "<|system|>b<|user|>a<|system|>c<|user|>a"


@pytest.mark.api("chat.completions", "documents")
async def test_documents_are_the_templates_to_show() -> None:
    shows = "{% for d in documents or [] %}[{{ d.title }}: {{ d.text }}]{% endfor %}" + PLAIN
    documents = [{"title": "the", "text": "dog"}, {"title": "a", "text": "fox"}]
    prompt = await prompt_of(shows, [USER], documents=documents)
    assert codec().decode(prompt, skip_special_tokens=False) == "[the: dog][a: fox]<|user|>a"
    for none in (None, []):
        assert await prompt_of(shows, [USER], documents=none) == ids("<|user|>a")
        assert await prompt_of(PLAIN, [USER], documents=none) == ids("<|user|>a")


@pytest.mark.api("chat.completions", "documents")
async def test_documents_that_a_template_would_leave_out_are_refused(http: httpx.AsyncClient) -> None:
    """The model would answer as if it had not been given any."""
    body = {"messages": [USER], "documents": [{"text": "dog"}]}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "documents"
    answer = await http.post("/v1/chat/completions", json=body | {"documents": ["dog"]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "documents.0"


LONG = "word " * 3000
FUNCTION = {"name": "look", "description": LONG}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": f'{{"a": "{LONG}"}}'}}


@pytest.mark.parametrize(
    ("fields", "is_long"),
    [
        ({}, False),
        ({"messages": [{"role": "user", "content": LONG}]}, True),
        ({"tools": [{"type": "function", "function": FUNCTION}]}, True),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, USER]}, True),
        ({"documents": [{"text": LONG}]}, True),
    ],
    ids=["short", "text", "tools", "calls", "documents"],
)
async def test_long_conversations_are_written_beside_the_event_loop(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], is_long: bool
) -> None:
    """Whatever they are long of: 3.5 MB of tools or of calls held every stream for two seconds."""
    threads: list[int] = []
    encode_chat = TextCodec.encode_chat

    def noted(self: TextCodec, *args: Any, **options: Any) -> list[int]:
        threads.append(threading.get_ident())
        return encode_chat(self, *args, **options)

    monkeypatch.setattr(TextCodec, "encode_chat", noted)
    await http.post("/v1/chat/completions", json={"messages": [USER]} | fields)
    assert [one != threading.get_ident() for one in threads] == [is_long]


#: Calls as the templates of most models write them.
CALLING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}{{ tools }}"
)
#: As Granite 3.3's.
WITHOUT_CALLS = PLAIN + "{{ tools }}<|tool_call|>"
#: As Functionary's.
JOINING = CALLING.replace("c.function.arguments | tojson", "'' + c.function.arguments")
#: As some that know of tools and of no results.
WITHOUT_RESULTS = (
    CALLING.replace("%}<|", "%}{% if m.role != 'tool' %}<|", 1).removesuffix("{% endfor %}{{ tools }}")
    + "{% endif %}{% endfor %}{{ tools }}"
)
ASKED = [
    USER,
    {
        "role": "assistant",
        "content": "d",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "e"},
]


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (CALLING, '<|user|>a<|assistant|>d[f {"x": 1}]<|tool|>e'),
        (JOINING, '<|user|>a<|assistant|>d[f {"x": 1}]<|tool|>e'),
        (
            WITHOUT_CALLS,
            '<|user|>a<|assistant|>d\n<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]<|tool|>e',
        ),
        (
            WITHOUT_RESULTS,
            '<|user|>a<|assistant|>d[f {"x": 1}]<|user|><tool_response>\ne\n</tool_response>',
        ),
    ],
)
@pytest.mark.api("chat.completions", "messages")
async def test_no_call_and_no_result_is_lost(template: str, told: str) -> None:
    """A model that is not told which function it called takes the result for something else."""
    prompt = codec_of(template).decode(await prompt_of(template, ASKED), skip_special_tokens=False)
    assert prompt.startswith(told)


async def test_several_calls_reach_a_template_that_takes_one_in_a_message() -> None:
    """Llama 3's models make several, and their template refused what they had made."""
    single = (
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}{{ no() }}{% endif %}"
    )
    template = single + CALLING.removeprefix("{% for m in messages %}")
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("f", "g")
    ]
    results = [{"role": "tool", "tool_call_id": name, "content": name.upper()} for name in ("g", "f", "h")]
    messages = [USER, {"role": "assistant", "content": "d", "tool_calls": calls}, *results, SAID[1], USER]
    prompt = codec_of(template).decode(await prompt_of(template, messages), skip_special_tokens=False)
    told = (
        "<|user|>a<|assistant|>d[f {}]<|tool|>F<|assistant|>[g {}]<|tool|>G<|tool|>H<|assistant|>d<|user|>a"
    )
    assert prompt.startswith(told)


async def test_where_a_template_refuses_systems_the_user_says_it() -> None:
    refuses = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        + PLAIN
    )
    prompt = await prompt_of(refuses, [SYSTEM, USER, DEVELOPER])
    assert codec().decode(prompt, skip_special_tokens=False) == "<|user|>b\n\nc\n\na"
