"""What a model thinks before it answers, told apart in every API."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from deployments.api_service import ApiService
from deployments.openai_api import create_app
from deployments.text_codec import TextCodec
from engine.constraint import Thought
from tests.deployments.socket_server import served
from tests.deployments.test_messages_api import events_of
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import codec, ids, tokenizer

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>'
HELLO: Any = {"role": "user", "content": "hello"}
#: A template that shows what is thought.
THOUGHTS = "{% for m in messages %}<{{ m.reasoning_content }}|{{ m.content }}>{% endfor %}</think>"
THINKS = "<think>\nhm, hello?\n</think>\n\nHi."


@pytest.fixture
async def url(cell: CellStandIn) -> AsyncIterator[str]:
    """A server whose model marks what it thinks, which is set here: the tiny template shows nothing of it."""
    cell.max_tokens = 2048
    service = ApiService(cell, codec(), tool_parser="hermes", reasoning_parser="think")
    async with served(create_app(service)) as address:
        yield address


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as made:
        yield made


def says(cell: CellStandIn, text: str, per_step: int = 3) -> None:
    cell.per_step = per_step
    cell.script = lambda submit: [*ids(text), *codec().eos_ids]


async def streamed(client: AsyncOpenAI, **fields: Any) -> tuple[str, str, list[Any]]:
    """What is thought, what is said and the calls, of a stream's deltas."""
    thought, said, calls = "", "", []
    async for chunk in await client.chat.completions.create(model="demo", stream=True, **fields):
        delta = chunk.choices[0].delta
        more = getattr(delta, "reasoning_content", None) or ""
        assert not (more and said), "thoughts come first"
        thought, said = thought + more, said + (delta.content or "")
        calls += delta.tool_calls or []
    return thought, said, calls


@pytest.mark.parametrize("per_step", [1, 3, 100])
@pytest.mark.api("chat.completions", "include_reasoning", "stream")
async def test_chats(client: AsyncOpenAI, cell: CellStandIn, per_step: int) -> None:
    says(cell, THINKS, per_step)
    whole = await client.chat.completions.create(model="demo", messages=[HELLO])
    message: Any = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("hm, hello?\n", "Hi.")
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    num_thought = whole.usage.completion_tokens_details.reasoning_tokens
    assert len(ids("<think>\nhm, hello?\n")) < (num_thought or 0) <= len(ids(THINKS))
    assert await streamed(client, messages=[HELLO]) == ("hm, hello?\n", "Hi.", [])
    silent = {"include_reasoning": False}
    whole = await client.chat.completions.create(model="demo", messages=[HELLO], extra_body=silent)
    assert whole.choices[0].message.content == "Hi."
    assert not hasattr(whole.choices[0].message, "reasoning_content")
    assert await streamed(client, messages=[HELLO], extra_body=silent) == ("", "Hi.", [])


@pytest.mark.parametrize("per_step", [1, 2, 100])
async def test_tokens_of_a_thought_are_counted_also_where_they_show_nothing(
    cell: CellStandIn, per_step: int
) -> None:
    """As the first bytes of a character do, and what may yet become a stop string."""
    marked, end = with_marks("{{ messages[0].content }}{# </think> #}")
    cell.vocab_size = end + 1
    thought = marked.encode("<think>日本語🙂🚀 en</think>", add_special_tokens=False)
    cell.script = lambda submit: [*thought, *ids("Hi."), *codec().eos_ids]
    cell.per_step = per_step
    service = ApiService(cell, marked)
    async with served(create_app(service)) as url, AsyncOpenAI(base_url=f"{url}/v1", api_key="-") as client:
        asked: Any = {"model": "demo", "messages": [HELLO], "stop": "end"}
        whole = await client.chat.completions.create(**asked)
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked, **options)]
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == len(thought)
    await service.close()


async def test_an_answer_without_a_thought(client: AsyncOpenAI, cell: CellStandIn) -> None:
    says(cell, "Hi. <think>no</think>")
    whole = await client.chat.completions.create(model="demo", messages=[HELLO])
    message: Any = whole.choices[0].message
    assert (message.reasoning_content, message.content) == (None, "Hi. <think>no</think>")
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("per_step", [1, 100])
@pytest.mark.api("chat.completions", "tools")
async def test_calls_that_are_only_thought_of_are_none(
    client: AsyncOpenAI, cell: CellStandIn, per_step: int
) -> None:
    says(cell, f"<think>Perhaps {CALL}?</think>\n{CALL}", per_step)
    thought, said, calls = await streamed(client, messages=[HELLO], tools=[TOOL])
    assert thought == f"Perhaps {CALL}?"
    assert (said.strip(), len([call for call in calls if call.id])) == ("", 1)


async def test_the_prompt_may_begin_the_thought(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    says(cell, "hm</think>Hi.")
    for prompt, told in (
        ("{{ messages[0].content }}<think>\n", ("hm", "Hi.")),
        ("<think> is a mark. {{ messages[0].content }}", (None, "hm</think>Hi.")),
        ("{{ messages[0].content }}<think></think>", (None, "hm</think>Hi.")),
    ):
        service = ApiService(cell, templated(prompt + "{# [/THINK] </think> #}"))
        async with served(create_app(service)) as url:
            answer = (await http_post(url, {"messages": [HELLO]})).json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == told
        await service.close()


async def test_nothing_is_parted_of_a_form_if_the_marks_are_no_tokens(url: str, cell: CellStandIn) -> None:
    says(cell, '{"a": 1}')
    body = {"messages": [HELLO], "response_format": {"type": "json_object"}}
    message = (await http_post(url, body)).json()["choices"][0]["message"]
    assert message["content"] == '{"a": 1}'
    assert "reasoning_content" not in message


@pytest.mark.parametrize(
    ("template", "is_open"),
    [
        ("{{ messages[0].content }}{# </think> #}", False),
        ("{{ messages[0].content }}<think>\n{# </think> #}", True),
        ("{{ messages[0].content }}<think>\n\n</think>\n\n", None),
    ],
)
async def test_a_form_begins_behind_the_thought(
    cell: CellStandIn, template: str, is_open: bool | None
) -> None:
    """Where the marks are tokens; where the prompt has closed it, there is none."""
    marked, end = with_marks(template)
    begin, cell.vocab_size = end - 1, end + 1
    text = {False: "<think>hm</think>", True: "hm</think>", None: ""}[is_open] + '{"a": 1}'
    cell.script = lambda submit: [*marked.encode(text, add_special_tokens=False), *marked.eos_ids]
    service = ApiService(cell, marked, tool_parser="hermes")
    async with served(create_app(service)) as url:
        for form in (
            {"response_format": {"type": "json_object"}},
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
        ):
            response = await http_post(url, {"messages": [HELLO], **form})
            assert response.status_code == 200, response.text
            message = response.json()["choices"][0]["message"]
            constraint = cell.submissions[-1].sampling.constraint
            assert constraint is not None
            if is_open is None:
                assert constraint.thought is None
                assert "reasoning_content" not in message
            else:
                assert constraint.thought == Thought(open_token=begin, close_token=end, is_open=is_open)
                assert message["reasoning_content"] == "hm"
            said = message["content"] or message["tool_calls"][0]["function"]["arguments"]
            assert said == '{"a": 1}'
    await service.close()


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
@pytest.mark.api("chat.completions", "messages")
async def test_thoughts_are_sent_back(cell: CellStandIn, field: str) -> None:
    service = ApiService(cell, templated(THOUGHTS))
    async with served(create_app(service)) as url:
        said = {"role": "assistant", "content": "Hi.", field: "hm"}
        response = await http_post(url, {"messages": [HELLO, said, HELLO]})
        assert response.status_code == 200, response.text
        assert "<hm|Hi.>" in codec().decode(cell.submissions[-1].prompt)
        blocks = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Hi."}]
        body = {"messages": [HELLO, {"role": "assistant", "content": blocks}, HELLO], "max_tokens": 9}
        assert (await http_post(url, body, "/v1/messages")).status_code == 200
        assert "<hm|Hi.>" in codec().decode(cell.submissions[-1].prompt)
        items = [
            HELLO,
            {"type": "reasoning", "id": "rs", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"role": "assistant", "content": "Hi."},
            HELLO,
        ]
        assert (await http_post(url, {"input": items}, "/v1/responses")).status_code == 200
        assert "<hm|Hi.>" in codec().decode(cell.submissions[-1].prompt)
    await service.close()


def reasoned(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs", "content": [{"type": "reasoning_text", "text": text}]}


@pytest.mark.parametrize(
    ("items", "told"),
    [
        ([HELLO, reasoned("a"), reasoned("b"), {"role": "assistant", "content": "Hi."}, HELLO], "<a\nb|Hi.>"),
        # An answer that the limit cut before it said anything.
        ([HELLO, reasoned("a"), HELLO, {"role": "assistant", "content": "Hi."}], "<a|><|hello><|Hi.>"),
        ([HELLO, reasoned("a")], "<|hello><a|>"),
        ([reasoned("a")], "<a|>"),
    ],
)
@pytest.mark.api("responses", "input")
async def test_no_thought_of_an_input_is_lost(cell: CellStandIn, items: list[Any], told: str) -> None:
    service = ApiService(cell, templated(THOUGHTS))
    async with served(create_app(service)) as url:
        response = await http_post(url, {"input": items}, "/v1/responses")
        assert response.status_code == 200, response.text
        assert told in codec().decode(cell.submissions[-1].prompt)
    await service.close()


@pytest.mark.api("messages", "messages")
async def test_thoughts_of_one_turn_are_all_told(cell: CellStandIn) -> None:
    """Between calls Anthropic's models think more than once."""
    service = ApiService(cell, templated(THOUGHTS))
    async with served(create_app(service)) as url:
        blocks = [
            {"type": "thinking", "thinking": "a"},
            {"type": "text", "text": "Hi."},
            {"type": "thinking", "thinking": "b"},
        ]
        body = {"messages": [HELLO, {"role": "assistant", "content": blocks}, HELLO], "max_tokens": 9}
        assert (await http_post(url, body, "/v1/messages")).status_code == 200
        assert "<a\nb|Hi.>" in codec().decode(cell.submissions[-1].prompt)
    await service.close()


@pytest.mark.parametrize("per_step", [1, 100])
async def test_responses(client: AsyncOpenAI, cell: CellStandIn, per_step: int) -> None:
    says(cell, THINKS, per_step)
    whole = await client.responses.create(model="demo", input="hello", top_logprobs=0)
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.output[0].to_dict()["content"] == [{"type": "reasoning_text", "text": "hm, hello?\n"}]
    assert whole.output_text == "Hi."
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    events = [e async for e in await client.responses.create(model="demo", input="hello", stream=True)]
    thought = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    said = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert ("".join(thought), "".join(said)) == ("hm, hello?\n", "Hi.")
    kinds = [event.type for event in events]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]


@pytest.mark.parametrize("per_step", [1, 100])
async def test_log_probabilities_of_an_answer_are_all_told(
    url: str, cell: CellStandIn, per_step: int
) -> None:
    """Also of tokens that were held back, as a thought might have begun with them."""
    text = " <b>Hi"
    says(cell, text, per_step)
    body = {"input": "a", "top_logprobs": 0}
    part = (await http_post(url, body, "/v1/responses")).json()["output"][0]["content"][0]
    assert part["text"] == text
    told = [entry["token"] for entry in part["logprobs"]]
    assert told[: len(ids(text))] == [codec().token_text(token) for token in ids(text)]


@pytest.mark.parametrize("per_step", [1, 100])
async def test_messages(url: str, cell: CellStandIn, per_step: int) -> None:
    says(cell, THINKS, per_step)
    asked: Any = {"model": "demo", "max_tokens": 64, "messages": [HELLO]}
    async with AsyncAnthropic(base_url=url, api_key="unused") as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
    for message in (whole, final):
        thought, said = message.content
        assert (thought.type, said.type) == ("thinking", "text")
        assert (thought.thinking, said.text) == ("hm, hello?\n", "Hi.")
        assert thought.signature, "clients send no thought back without, or as text"
        assert message.usage.output_tokens_details is not None
        assert message.usage.output_tokens_details.thinking_tokens > len(ids("<think>\nhm, hello?\n"))
    says(cell, "<think>for ever", per_step)
    events = events_of((await http_post(url, asked | {"stream": True}, "/v1/messages")).text)
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert (starts, stops) == (["thinking", "text"], [0, 1])
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert deltas[-1] == "signature_delta"


async def test_nothing_is_parted_of_completions(url: str, cell: CellStandIn) -> None:
    says(cell, THINKS)
    answer = (await http_post(url, {"prompt": "a", "max_tokens": 64}, "/v1/completions")).json()
    assert answer["choices"][0]["text"] == THINKS


async def http_post(url: str, body: dict[str, Any], path: str = CHAT) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.post(url + path, json=body)


def with_marks(template: str) -> tuple[TextCodec, int]:
    """The tiny tokenizer with the marks as its last two tokens, and the later of them."""
    changed = copy.deepcopy(tokenizer())
    changed.add_tokens(["<think>", "</think>"])
    changed.chat_template = template
    marked = TextCodec(changed)
    begin, end = (marked.encode(mark, add_special_tokens=False)[0] for mark in ("<think>", "</think>"))
    assert begin == end - 1
    return marked, end


def templated(template: str) -> TextCodec:
    """The tiny tokenizer under another chat template."""
    changed = copy.deepcopy(tokenizer())
    changed.chat_template = template
    return TextCodec(changed)


#: A template of Qwen3's kind, and of gpt-oss'.
EFFORTS = "{{ enable_thinking }} {{ reasoning_effort }} {{ messages[0].content }}{# <think> </think> #}"


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        ("chat/completions", {}, " "),
        ("chat/completions", {"reasoning_effort": "none"}, "False none"),
        ("chat/completions", {"reasoning_effort": "low"}, "True low"),
        (
            "chat/completions",
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            "False low",
        ),
        ("responses", {"reasoning": {"effort": None, "summary": "auto"}}, " "),
        ("responses", {"reasoning": {"effort": "none"}}, "False none"),
        ("responses", {"reasoning": {"effort": "high"}}, "True high"),
        ("messages", {}, " "),
        ("messages", {"thinking": {"type": "disabled"}}, "False "),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "True "),
        (
            "messages",
            {"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"enable_thinking": False}},
            "False ",
        ),
    ],
)
@pytest.mark.api("chat.completions", "reasoning_effort")
@pytest.mark.api("responses", "reasoning")
@pytest.mark.api("messages", "thinking")
async def test_how_to_reason_is_told_to_the_template(
    cell: CellStandIn, path: str, fields: dict[str, Any], told: str
) -> None:
    """A model that thinks unless told otherwise went on thinking for clients that had said not to."""
    service = ApiService(cell, templated(EFFORTS))
    body = {"input": [HELLO]} if path == "responses" else {"messages": [HELLO], "max_tokens": 9}
    async with served(create_app(service)) as url:
        response = await http_post(url, body | fields, f"/v1/{path}")
        assert response.status_code == 200, response.text
        assert codec().decode(cell.submissions[-1].prompt) == f"{told} hello"
        if path == "responses":
            assert response.json()["reasoning"] == {"effort": told.split(" ")[1] or None, "summary": None}
    await service.close()


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"reasoning_effort": 3}, "reasoning_effort"),
        ("responses", {"reasoning": {"effort": 3}}, "reasoning.effort"),
        ("responses", {"reasoning": "high"}, "reasoning"),
        ("messages", {"thinking": {"type": "much"}}, "thinking.type"),
    ],
)
async def test_how_to_reason_is_refused_where_it_says_nothing(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    body = {"input": [HELLO]} if path == "responses" else {"messages": [HELLO], "max_tokens": 9}
    response = await http.post(f"/v1/{path}", json=body | fields)
    assert response.status_code == 400, response.text
    assert param in response.json()["error"]["message"]
