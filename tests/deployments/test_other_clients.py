"""What clients of other servers send, and gateways in between: it does no harm here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from cluster.http_config import HttpConfig
from deployments.api_service import ApiService
from deployments.openai_api import create_app
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import codec

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HELLO: dict[str, Any] = {"role": "user", "content": "hello"}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
FLAT_TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}


@asynccontextmanager
async def client_of(service: ApiService, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=create_app(service, **options), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://cell") as client:
        yield client


@pytest.mark.api("chat.completions", "messages", "tools")
async def test_what_gateways_add_to_messages_and_tools_changes_nothing(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    """LiteLLM, crush and others send answers back with fields of the server that gave them."""
    cell.max_tokens = 2048
    result = {"role": "tool", "content": "b", "tool_call_id": "c"}
    plain = [HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL]}, result]
    added = [
        HELLO | {"cache_control": {"type": "ephemeral"}},
        {
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": ""}],
            "refusal": "no",
            "reasoning": "",
            "provider_specific_fields": {"thinking": []},
            "tool_calls": [CALL | {"extra_content": {"a": 1}, "index": 0}],
        },
        result | {"is_error": False},
    ]
    tool = TOOL | {"cache_control": {"type": "ephemeral"}, "function": TOOL["function"] | {"title": "Look"}}
    for messages, tools in ((plain, [TOOL]), (added, [tool])):
        response = await http.post(CHAT, json={"messages": messages, "tools": tools})
        assert response.status_code == 200, response.text
    first, second = cell.submissions
    assert first.prompt == second.prompt


@pytest.mark.parametrize("tool_parser", ["glm", "hermes", "json", "qwen3_coder"])
@pytest.mark.api("chat.completions", "messages")
async def test_a_call_that_is_no_json_is_shown_to_the_model_as_it_wrote_it(
    service: ApiService, cell: CellStandIn, tool_parser: str
) -> None:
    """A conversation goes on after a call that was malformed, or cut off."""
    assert service.tool_parser == tool_parser
    cell.max_tokens = 2048
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "x'}}
    result = {"role": "tool", "content": "no JSON", "tool_call_id": "c"}
    said = [
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"at": "x'},
        {"type": "function_call_output", "call_id": "c", "output": "no JSON"},
    ]
    async with client_of(service) as client:
        messages = [HELLO, {"role": "assistant", "tool_calls": [call]}, result]
        for path, body in ((CHAT, {"messages": messages}), (RESPONSES, {"input": [HELLO, *said]})):
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
    first, second = cell.submissions
    assert first.prompt == second.prompt
    assert '{"at": "x' in codec().decode(first.prompt)


@pytest.mark.api("chat.completions", "reasoning_effort", "verbosity", "store", "include_reasoning")
async def test_how_to_reason_and_what_to_keep_is_accepted(http: httpx.AsyncClient) -> None:
    """Agents ask every model so, and models that know nothing of it answer all the same."""
    body = {"messages": [HELLO], "reasoning_effort": "low", "verbosity": "low", "store": True}
    response = await http.post(CHAT, json=body | {"include_reasoning": False})
    assert response.status_code == 200, response.text


@pytest.mark.api(
    "responses", "client_metadata", "include", "input", "reasoning", "store", "text", "tools", "truncation"
)
async def test_what_codex_sends_is_answered(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    """Its tools are more than functions; the model hears of those alone, and the response lists no other.

    Those that it has from servers of the Model Context Protocol are functions in a namespace.
    """
    cell.max_tokens = 2048
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hm"}]}
    body: dict[str, Any] = {
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
            said | {"phase": "commentary"},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}", "namespace": "mcp"},
            {"type": "function_call_output", "call_id": "c", "output": "b"},
        ],
        "tools": [
            FLAT_TOOL | {"defer_loading": False},
            {"type": "web_search", "external_web_access": True},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
            {
                "type": "namespace",
                "name": "mcp__files",
                "tools": [FLAT_TOOL, {"type": "custom", "name": "x"}],
            },
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": True,
        "stream": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
        "truncation": "auto",
        "client_metadata": {"session": "s"},
    }
    response = await http.post(RESPONSES, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [tool["name"] for tool in answer["tools"]] == ["look", "mcp__files"]
    assert [tool["name"] for tool in answer["tools"][1]["tools"]] == ["look"]
    assert (answer["store"], answer["truncation"]) == (False, "auto")
    call = {"type": "function_call", "call_id": "c", "name": "mcp__look", "arguments": "{}"}
    plain = {
        "instructions": body["instructions"],
        "input": [body["input"][0], said, call, body["input"][4]],
        "tools": [FLAT_TOOL, FLAT_TOOL | {"name": "mcp__files__look"}],
    }
    assert (await http.post(RESPONSES, json=plain)).status_code == 200
    first, second = cell.submissions
    assert first.prompt == second.prompt


@pytest.mark.api("responses", "truncation")
async def test_a_prompt_may_be_cut_to_fit(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    long = {"input": "word " * 3000, "max_output_tokens": 4}
    assert (await http.post(RESPONSES, json=long)).status_code == 400
    assert (await http.post(RESPONSES, json=long | {"truncation": "disabled"})).status_code == 400
    assert (await http.post(RESPONSES, json=long | {"truncation": "auto"})).status_code == 200
    assert len(cell.submissions[0].prompt) == cell.max_tokens - 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, {"messages": [HELLO]}),
        (RESPONSES, {"input": "a"}),
        ("/v1/messages", {"messages": [HELLO], "max_tokens": 9}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_fields_are_left_out_where_that_is_set(
    service: ApiService, path: str, body: dict[str, Any], stream: bool
) -> None:
    body = body | {"stream": stream}
    unknown = {"thinking_token_budget": 5, "colour\r\nx": "red", "é": 1, "nothing": None}
    async with client_of(service) as strict:
        assert (await strict.post(path, json=body | unknown)).status_code == 400
    async with client_of(service, ignores_unknown_fields=True) as lenient:
        response = await lenient.post(path, json=body | unknown)
        assert response.status_code == 200, response.text
        assert response.headers["x-ignored-fields"] == "colour%0D%0Ax, thinking_token_budget, %C3%A9"
        assert "x-ignored-fields" not in (await lenient.post(path, json=body)).headers
        # What is known is still read strictly, and an objective is never missed by a slip of the pen.
        for wrong in ({"temperature": 9}, {"slo": {"tpot": 5}}, {"use_beam_search": True}):
            assert (await lenient.post(path, json=body | wrong)).status_code == 400
        # Nor is what must be in an answer left out, where it is SGLang's or llama.cpp's name of it.
        wrong_schema = '{"type": "x"}'
        for name, value in (("json_schema", wrong_schema), ("grammar", "root ::= x"), ("stop_regex", "a+")):
            refused = await lenient.post(path, json=body | {name: value})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


async def test_so_are_those_of_requests_for_tokens(service: ApiService) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        async with client_of(service) as strict:
            assert (await strict.post(path, json=body | {"colour": "red"})).status_code == 400
        async with client_of(service, ignores_unknown_fields=True) as lenient:
            response = await lenient.post(path, json=body | {"colour": "red"})
            assert response.status_code == 200, response.text
            assert response.headers["x-ignored-fields"] == "colour"
            assert (await lenient.post(path, json=body | {"model": 5})).status_code == 400


async def test_pages_of_allowed_origins_may_ask_for_text(service: ApiService) -> None:
    there, elsewhere = {"Origin": "https://chat.example"}, {"Origin": "https://other.example"}
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with client_of(service, allowed_origins=("https://chat.example",)) as client:
        asked = await client.options(CHAT, headers=there | asks)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == "https://chat.example"
        assert asked.headers["access-control-allow-headers"] == "authorization"
        assert "access-control-allow-private-network" not in asked.headers
        answer = await client.post(CHAT, json={"messages": [HELLO]}, headers=there)
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        refused = await client.post(CHAT, json={"messages": []}, headers=there)
        assert refused.status_code == 400
        assert refused.headers["access-control-allow-origin"] == "https://chat.example"
        assert (await client.options(CHAT, headers=elsewhere | asks)).status_code == 400
        other = await client.post(CHAT, json={"messages": [HELLO]}, headers=elsewhere)
        assert "access-control-allow-origin" not in other.headers
        # What others asked, and how the server is, is for no page.
        for path in ("/debug/decisions", "/admin/drafters", "/metrics"):
            assert "access-control-allow-origin" not in (await client.get(path, headers=there)).headers
            assert (await client.options(path, headers=there | asks)).status_code in (404, 405)
    async with client_of(service) as client:
        assert (await client.options(CHAT, headers=there | asks)).status_code == 405


async def test_pages_that_are_named_reach_a_server_within(service: ApiService) -> None:
    """As Chrome asks where the page is on the internet and the server on this machine, or in its network."""
    asks = {
        "Origin": "https://chat.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Private-Network": "true",
    }
    async with client_of(service, allowed_origins=("https://chat.example",)) as client:
        asked = await client.options(CHAT, headers=asks)
        assert (asked.status_code, asked.headers["access-control-allow-private-network"]) == (200, "true")
        other = await client.options(CHAT, headers=asks | {"Origin": "https://other.example"})
        assert other.status_code == 400
    async with client_of(service, allowed_origins=("*",)) as client:
        assert (await client.options(CHAT, headers=asks)).status_code == 400


async def test_pages_may_read_what_clients_look_at(service: ApiService) -> None:
    """Anthropic's has the id of a request from `request-id`."""
    page = {"Origin": "https://chat.example", "Idempotency-Key": "one"}
    body = {"messages": [HELLO], "max_tokens": 8}
    async with client_of(service, allowed_origins=("https://chat.example",)) as client:
        for _ in range(2):
            answer = await client.post("/v1/messages", json=body, headers=page)
        shown = answer.headers["access-control-expose-headers"].lower().split(", ")
    own = {name for name in answer.headers if name not in ("content-type", "content-length", "vary")}
    assert {name for name in own if not name.startswith("access-control")} <= set(shown)
    assert {"request-id", "idempotent-replayed"} <= own


@pytest.mark.parametrize("allowed", [("https://chat.example",), ("*",)])
async def test_such_pages_may_read_that_there_is_a_bug(
    service: ApiService, monkeypatch: pytest.MonkeyPatch, allowed: tuple[str, ...]
) -> None:
    def tool_use(request: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(service, "tool_use", tool_use)
    async with client_of(service, allowed_origins=allowed) as client:
        for origin, is_allowed in (("https://chat.example", True), ("https://other.example", "*" in allowed)):
            headers = {"Origin": origin}
            answer = await client.post(CHAT, json={"messages": [HELLO]}, headers=headers)
            assert answer.status_code == 500
            shown = answer.headers.get("access-control-allow-origin")
            assert shown == (allowed[0] if is_allowed else None), origin
            assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        answer = await client.post(CHAT, json={"messages": [HELLO]})
        assert "access-control-allow-origin" not in answer.headers


def test_origins_are_origins() -> None:
    assert HttpConfig(allowed_origins=("*", "http://localhost:3000")).allowed_origins
    for wrong in ("chat.example", "https://chat.example/", "https://a/b", "ftp://a", ""):
        with pytest.raises(ValidationError, match="no origin"):
            HttpConfig(allowed_origins=(wrong,))


async def test_a_connection_goes_on_after_a_head(url: str) -> None:
    """Proxies probe with HEAD over connections on which they send the next request."""
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=1)) as client:
        for path in ("/health", "/v1/models", "/nothing"):
            head = await client.head(f"{url}{path}")
            assert int(head.headers["content-length"]) > 0
            stream = head.extensions["network_stream"].get_extra_info("client_addr")
            answer = await client.post(f"{url}{COMPLETIONS}", json={"prompt": "a"})
            assert answer.status_code == 200
            assert answer.extensions["network_stream"].get_extra_info("client_addr") == stream


@pytest.mark.parametrize("body", [{"prompt": "word " * 3000}, {"prompt": "a", "max_tokens": 9000}])
async def test_gateways_know_that_the_context_is_too_long(
    http: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    """LiteLLM, and who builds on it, looks for OpenAI's words, and falls back to a larger window then."""
    error = (await http.post(COMPLETIONS, json=body)).json()["error"]
    assert error["message"].startswith("This model's maximum context length is 256 tokens. However, ")
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("reference", [{"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}])
@pytest.mark.api("responses", "input")
async def test_what_refers_to_stored_items_is_told_to_send_them(
    http: httpx.AsyncClient, reference: dict[str, Any]
) -> None:
    """Vercel's AI SDK does, from the second turn on, unless told `store: false`."""
    response = await http.post(RESPONSES, json={"input": [HELLO, reference, HELLO]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "input.1")
    assert error["code"] == "unsupported_parameter"
    assert "this server stores none" in error["message"]
    assert "`store: false`" in error["message"]


@pytest.mark.parametrize(
    ("path", "sent", "meant"),
    [
        (RESPONSES, {"input": "a", "max_tokens": 9}, "max_output_tokens"),
        (RESPONSES, {"input": "a", "messages": [HELLO]}, "input"),
        (COMPLETIONS, {"prompt": "a", "max_completion_tokens": 9}, "max_tokens"),
        (CHAT, {"messages": [HELLO], "max_output_tokens": 9}, "max_completion_tokens"),
        (CHAT, {"messages": [HELLO], "input": "a"}, "messages"),
        ("/v1/messages", {"messages": [HELLO], "max_tokens": 9, "instructions": "a"}, "system"),
    ],
)
async def test_a_field_of_another_endpoint_is_told_its_name_here(
    http: httpx.AsyncClient, path: str, sent: dict[str, Any], meant: str
) -> None:
    """`max_tokens` of a response was said to be meant as `min_tokens`, which is spelt almost the same."""
    error = (await http.post(path, json={"model": "demo", **sent})).json()["error"]
    assert error["code"] == "unknown_parameter"
    assert f"Did you mean `{meant}`?" in error["message"]


@pytest.mark.parametrize("half", [r"\ud83d", r"cut \ud83d here", r"\ud83d\u0041", r"\ude00", r"\ud83d\n"])
async def test_half_of_a_surrogate_pair_is_called_that(http: httpx.AsyncClient, half: str) -> None:
    """JavaScript writes it for a text that was cut within an emoji; it is no character."""
    sent = {"content": f'{{"prompt": "{half}"}}', "headers": {"Content-Type": "application/json"}}
    error = (await http.post(COMPLETIONS, **sent)).json()["error"]
    assert error["code"] == "invalid_json"
    assert "half of a surrogate pair" in error["message"]
    assert "at line 1 column " in error["message"]
    whole = {**sent, "content": r'{"prompt": "\ud83d\ude00 \\ud83d"}'}
    assert (await http.post(COMPLETIONS, **whole)).status_code == 200


@pytest.mark.api("chat.completions", "messages")
async def test_what_has_to_be_null_is_told_in_the_words_of_json(http: httpx.AsyncClient) -> None:
    called = {"role": "assistant", "function_call": {"name": "look", "arguments": "{}"}}
    error = (await http.post(CHAT, json={"messages": [HELLO, called]})).json()["error"]
    assert error["param"] == "messages.1.function_call"
    assert error["message"] == "`messages.1.function_call`: must be null."


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        (f"/{CHAT}", f"there is {CHAT}: the client's base URL is to end without a slash"),
        (
            f"/v1/{CHAT.removeprefix('/v1')}",
            f"there is {CHAT}: the client's base URL is to end without a slash",
        ),
        ("//nothing", "the routes are listed in /openapi.json"),
    ],
)
async def test_a_base_url_that_ends_with_a_slash_is_called_that(
    http: httpx.AsyncClient, path: str, advice: str
) -> None:
    """Scripts put the path behind it as it is, slash and all."""
    response = await http.post(f"http://cell{path}", json={"messages": [HELLO]})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "not_found")
    assert error["message"] == f"There is no {path} here; {advice}."
