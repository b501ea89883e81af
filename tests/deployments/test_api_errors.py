"""Whatever is sent, the answer is an OpenAI-style error that names the field, and the server stays well."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest

from cluster.stream_messages import Rejected
from deployments.api_service import ApiService
from tests.deployments.bad_requests import BASES
from tests.fakes.cell_stand_in import CellStandIn

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
#: The template takes what a system says at the beginning only.
LATE = {"role": "system", "content": "late"}


def check_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param
    if param is not None:
        assert f"`{param.partition('.')[0]}" in error["message"], error["message"]
    return error


BAD_FIELDS: list[tuple[str, Any]] = [
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", 1e999),
    ("top_p", -0.1),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("max_tokens", 0),
    ("max_tokens", "10"),
    ("max_tokens", 1_000_000),
    ("min_tokens", 17),
    ("n", 9),
    ("n", 0),
    ("seed", 1 << 70),
    ("stop", [""]),
    ("stop", 5),
    ("stop", ["x"] * 17),
    ("stop_token_ids", [100_000]),
    ("stop_token_ids", ["a"]),
    ("logit_bias", {"100000": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": "a"}),
    ("logit_bias", [1]),
    ("slo", {"tpot_ms": 0}),
    ("slo", {"tpot_ms": -3}),
    ("slo", {"tpot": 3}),
    ("slo", "fast"),
    ("speculation", {"mode": "maximal"}),
    ("speculation", {"drafters": ["nobody"]}),
    ("speculation", {"max_tokens": -1}),
    ("service_tier", "gold"),
    ("priority", "high"),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("best_of", 9),
    ("best_of", True),
    ("suffix", "tail"),
    ("temperatur", 1),
    ("user", 5),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_bad_field_is_named(
    http: httpx.AsyncClient, cell: CellStandIn, path: str, field: str, value: Any
) -> None:
    base: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    if field == "min_tokens":
        base["max_tokens"] = 16
    body = json.dumps(base | {field: value}).encode()
    response = await http.post(path, content=body)
    error = response.json()["error"]
    check_error(response, 400, error["param"])
    # A number JSON cannot hold is bad JSON; everything else is the field's fault.
    assert value == 1e999 or error["param"].partition(".")[0] == field
    assert cell.submissions == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", None,
     "text/plain; application/json", "text/plain, application/json", "application/jsonx", "text/x+json"],
)  # fmt: skip
async def test_a_body_must_be_announced_as_json(
    http: httpx.AsyncClient, cell: CellStandIn, path: str, kind: str | None
) -> None:
    """Pages in browsers may send the first three, and none at all, to any server, unasked."""
    request = http.build_request("POST", path, content=json.dumps(BASES[path]))
    del request.headers["Content-Type"]
    if kind is not None:
        request.headers["Content-Type"] = kind
    assert check_error(await http.send(request), 415)["code"] == "not_json"
    assert cell.submissions == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/tokenize", "/detokenize"])
async def test_a_compressed_body_is_refused_as_such(
    http: httpx.AsyncClient, cell: CellStandIn, path: str
) -> None:
    body, headers = gzip.compress(json.dumps(BASES[path]).encode()), {"Content-Encoding": "gzip"}
    answer = await http.post(path, content=body, headers=headers | {"Content-Type": "application/json"})
    assert check_error(answer, 415)["code"] == "encoded_body"
    assert cell.submissions == []


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"]
)
async def test_json_has_several_names(http: httpx.AsyncClient, kind: str) -> None:
    response = await http.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"Content-Type": kind})
    assert response.status_code == 200, response.text


NUMBERS = [
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "min_tokens", "max_tokens", "truncate_prompt_tokens", "priority", "n", "prompt_logprobs",
]  # fmt: skip
HOLD_NUMBERS = [
    '"logit_bias": {"5": %s}', '"slo": {"tpot_ms": %s}', '"speculation": {"max_tokens": %s}',
    '"metadata": {"a": %s}', '"allowed_token_ids": [%s]', '"stop_token_ids": [%s]',
    '"guided_json": {"type": "number", "maximum": %s}', '"vllm_xargs": {"a": [{"b": %s}]}',
    '"structured_outputs": {"json": {"maximum": %s}}',
]  # fmt: skip


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 400 + ".5"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_no_field_takes_numbers_beyond_those_of_a_double(
    http: httpx.AsyncClient, cell: CellStandIn, path: str, number: str
) -> None:
    """JSON has them; read as infinity they would pass wherever any JSON does, as in a schema."""
    base = '"messages": [{"role": "user", "content": "a"}]' if path == CHAT else '"prompt": "a"'
    fields = [f'"{name}": %s' for name in NUMBERS] + HOLD_NUMBERS
    if path == CHAT:
        fields += ['"chat_template_kwargs": {"a": %s}', '"top_logprobs": %s', '"tools": [{"a": %s}]']
    for field in fields:
        body = "{" + base + ", " + field % number + "}"
        response = await http.post(path, content=body)
        error = check_error(response, 400, response.json()["error"]["param"])
        assert error["param"].partition(".")[0] == field.split('"')[1]
    assert cell.submissions == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "robot", "content": ""}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content",
        ),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "logprobs": 1}, "logprobs"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "tools": [{}]}, "tools.0.type"),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "yaml"}}, "response_format.type"),
        (CHAT, {"messages": MESSAGES, "prompt": "hi"}, "prompt"),
        (CHAT, {"messages": [*MESSAGES, LATE], "continue_final_message": True}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "long " * 300}]}, "messages"),
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": {"text": "a"}}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [511, 512]}, "prompt"),
        (COMPLETIONS, {"prompt": [True]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 65}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 60, "n": 8}, "n"),
        (COMPLETIONS, {"prompt": [5] * 256}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * 250, "max_tokens": 7}, "max_tokens"),
        (COMPLETIONS, {"prompt": "", "add_special_tokens": False}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "messages": MESSAGES}, "messages"),
    ],
)
async def test_bad_request_is_named(http: httpx.AsyncClient, path: str, body: Any, param: str) -> None:
    error = check_error(await http.post(path, json=body), 400, param)
    assert error["type"] == "invalid_request_error"


async def test_window_error_tells_both_lengths(http: httpx.AsyncClient) -> None:
    error = check_error(
        await http.post(COMPLETIONS, json={"prompt": [5] * 250, "max_tokens": 7}), 400, "max_tokens"
    )
    assert error["code"] == "context_length_exceeded"
    assert all(number in error["message"] for number in ("250", "256", "7", "6"))


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 9000, b'{"prompt": NaN}', b'{"a": "\\ud800"}'],
)
async def test_bad_json(http: httpx.AsyncClient, body: bytes) -> None:
    assert check_error(await http.post(COMPLETIONS, content=body), 400)["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("body", "field", "advice"),
    [
        ({"max_token": 5}, "max_token", "Did you mean `max_tokens`?"),
        ({"slo": {"tpot": 5}}, "slo.tpot", "Did you mean `tpot_ms`?"),
        ({"zzz": 5}, "zzz", "Remove it;"),
        ({"": 5}, "", "Remove it;"),
    ],
)
async def test_an_unknown_field_is_told_which_one_was_meant(
    http: httpx.AsyncClient, body: dict[str, Any], field: str, advice: str
) -> None:
    error = check_error(await http.post(CHAT, json={"messages": MESSAGES, **body}), 400, field)
    assert error["code"] == "unknown_parameter"
    assert error["message"].startswith(f"Unknown field `{field}`. {advice}")


@pytest.mark.parametrize(("number", "is_named"), [(1000, True), (1001, False)])
async def test_of_very_many_unknown_fields_none_is_named(
    http: httpx.AsyncClient, number: int, is_named: bool
) -> None:
    """Of 300,000, which four mebibytes hold, naming the first took a second of everybody's time."""
    body = {"messages": MESSAGES, **{f"field_{place}": 1 for place in range(number)}}
    error = check_error(await http.post(CHAT, json=body), 400, "field_0" if is_named else None)
    assert error["code"] == ("unknown_parameter" if is_named else "invalid_value")
    assert ("`field_0`" if is_named else "More than 1,000 fields") in error["message"]


async def test_unknown_model(http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, json={"model": "gpt-9", "messages": MESSAGES})
    error = check_error(response, 404, "model")
    assert error["code"] == "model_not_found"
    assert "'demo'" in error["message"]


async def test_unknown_route_and_method(http: httpx.AsyncClient) -> None:
    assert check_error(await http.get("/v2/nothing"), 404)["code"] == "not_found"
    for path, meant in ((CHAT.removeprefix("/v1"), CHAT), ("/v1/v1/messages", "/v1/messages")):
        assert f"there is {meant}: the " in check_error(await http.post(path, json={}), 404)["message"]
    assert check_error(await http.get(CHAT), 405)["code"] == "method_not_allowed"


async def test_heads_are_those_of_gets(http: httpx.AsyncClient) -> None:
    for path, status in (("/health", 200), ("/v1/models", 200), ("/v2/nothing", 404), (CHAT, 405)):
        whole, head = await http.get(path), await http.head(path)
        assert (whole.status_code, head.status_code) == (status, status)
        assert head.content == b""
        assert whole.content
        for name in ("content-type", "content-length"):
            assert head.headers[name] == whole.headers[name]


async def test_body_too_large(http: httpx.AsyncClient) -> None:
    check_error(await http.post(COMPLETIONS, json={"prompt": "x" * 30_000}), 413)

    async def unannounced() -> Any:
        for _ in range(30):
            yield b"x" * 1000

    check_error(await http.post(COMPLETIONS, content=unannounced()), 413)


@pytest.mark.parametrize(
    ("code", "retry_after_s", "status", "param"),
    [
        ("queue_full", 2.5, 429, None),
        ("slo_infeasible", None, 400, "slo"),
        ("saturated", 1.0, 429, "slo"),
        ("prompt_too_long", None, 400, "prompt"),
        ("draining", None, 503, None),
        ("not_ready", 5.0, 503, None),
        ("bad_token", None, 400, "prompt"),
        ("unknown_adapter", None, 404, "model"),
        ("duplicate_id", None, 409, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_rejection_is_a_status(
    http: httpx.AsyncClient,
    cell: CellStandIn,
    code: str,
    retry_after_s: float | None,
    status: int,
    param: str | None,
    stream: bool,
) -> None:
    message = "`slo`, `model` and `prompt` cannot be had"
    cell.reject = Rejected(request_id="", code=code, message=message, retry_after_s=retry_after_s)
    response = await http.post(COMPLETIONS, json={"prompt": "a", "stream": stream})
    check_error(response, status, param)
    if status in (429, 503):
        assert int(response.headers["retry-after"]) >= (retry_after_s or 1)
    assert response.headers.get("x-llm-d-request-dropped-reason") == (
        "rejected-saturated" if status == 429 else None
    )


async def test_cell_that_is_away_is_503(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    cell.away = True
    response = await http.post(COMPLETIONS, json={"prompt": "a"})
    check_error(response, 503)
    assert response.headers["retry-after"]
    cell.away = False
    assert (await http.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200


async def test_cell_error_before_the_answer_and_in_its_middle(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    cell.finish_reason = "error"
    assert check_error(await http.post(COMPLETIONS, json={"prompt": "a"}), 500)["code"] == "cell_error"
    response = await http.post(COMPLETIONS, json={"prompt": "a", "stream": True})
    assert response.status_code == 200
    assert "event: error\ndata: " in response.text
    assert "[DONE]" not in response.text


async def test_the_answer_to_a_bug_names_the_request(
    http: httpx.AsyncClient, service: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tool_use(request: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(service, "tool_use", tool_use)
    named = {"X-Request-Id": "mine"}
    response = await http.post(COMPLETIONS, json={"prompt": "a"}, headers=named)
    assert check_error(response, 500)["code"] == "internal_error"
    assert response.headers["x-request-id"] == "mine"
    body = {"messages": MESSAGES, "max_tokens": 9}
    response = await http.post("/v1/messages", json=body, headers=named)
    assert (response.status_code, response.headers["request-id"]) == (500, "mine")
    response = await http.post(COMPLETIONS, json={"prompt": "a", "request_id": "of-the-body"})
    assert response.headers["x-request-id"] == "of-the-body"


async def test_a_constraint_that_cannot_be_followed_any_further_is_the_clients(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    cell.finish_reason, cell.error = "error", "it takes too much work"
    error = check_error(await http.post(COMPLETIONS, json={"prompt": "a"}), 400)
    assert error["code"] == "invalid_constraint"
    assert "too much work" in error["message"]
    response = await http.post(COMPLETIONS, json={"prompt": "a", "stream": True})
    assert "event: error\ndata: " in response.text
    assert "invalid_constraint" in response.text


async def test_a_cell_that_describes_itself_wrongly_is_not_ready(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    cell.vocab_size = None  # type: ignore[assignment]
    check_error(await http.post(COMPLETIONS, json={"prompt": "a"}), 503)


@pytest.mark.parametrize("request_id", ["a/b", "mine; drop", "", "x" * 129, "é", "line\n"])
async def test_request_ids_that_cannot_be_logged_are_refused(
    http: httpx.AsyncClient, cell: CellStandIn, request_id: str
) -> None:
    for path, base in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
    ):
        response = await http.post(path, json={**base, "request_id": request_id})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "request_id"
        assert "must be 1 to 128 letters, digits or any of . _ : ~ -" in error["message"]
        allowed = f"a.B_1:~-{len(path)}"
        response = await http.post(path, json={**base, "request_id": allowed})
        assert response.headers["x-request-id"] == allowed
