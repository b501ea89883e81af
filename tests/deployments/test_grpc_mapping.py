"""A gRPC request is read as the HTTP body of the same fields is, and fails as that does."""

from __future__ import annotations

import json
import string
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from deployments import grpc_mapping as mapping
from deployments.errors import ApiError, not_ready
from deployments.openai_schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    json_object,
    validated,
)
from deployments.proto.flotilla.v1 import generation_pb2 as pb

_SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "model": st.text(max_size=8),
    "max_tokens": st.integers(0, 99),
    "min_tokens": st.integers(0, 9),
    "n": st.integers(0, 9),
    "temperature": st.floats(-1, 3),
    "top_p": st.floats(-0.5, 1.5),
    "top_k": st.integers(-2, 99),
    "min_p": st.floats(-0.5, 1.5),
    "presence_penalty": st.floats(-3, 3),
    "frequency_penalty": st.floats(-3, 3),
    "repetition_penalty": st.floats(-1, 3),
    "logit_bias": st.dictionaries(st.integers(0, 999).map(str), st.floats(-101, 101), min_size=1, max_size=3),
    "seed": st.integers(-(1 << 62), 1 << 62),
    "stop": st.lists(st.text(max_size=3), min_size=1, max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 99), min_size=1, max_size=3),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "return_token_ids": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "add_special_tokens": st.booleans(),
    "priority": st.integers(-9, 9),
    "service_tier": st.text(max_size=4),
    "request_id": st.text(max_size=4),
    "slo": st.fixed_dictionaries(
        {"tpot_ms": st.floats(-1, 99)}, optional={"ttft_ms": st.floats(-1, 99), "on_miss": st.just("reject")}
    ),
    "speculation": st.fixed_dictionaries(
        {"mode": st.sampled_from(["auto", "off", "on"])},
        optional={"max_tokens": st.integers(0, 2000), "drafters": st.lists(st.text(max_size=3), min_size=1)},
    ),
}


def parse(body: bytes, request_type: type[GenerationRequest]) -> GenerationRequest:
    """What HTTP makes of a body."""
    return validated(json_object(body), request_type)


def outcome(read: Any) -> Any:
    """What reading gives: the request, or the error."""
    try:
        return read()
    except ApiError as error:
        return error.status, error.body()


@given(fields=st.fixed_dictionaries({}, optional=_SAMPLING))
def test_fields_are_read_as_over_http(fields: dict[str, Any]) -> None:
    body = {"prompt": "hello", **fields}
    message = json_format.ParseDict(body, pb.GenerateRequest())
    over_http = outcome(lambda: parse(json.dumps(body).encode(), CompletionRequest))
    assert outcome(lambda: mapping.generation_request(message)) == over_http


def test_every_field_is_one_of_the_http_api() -> None:
    known = set(CompletionRequest.model_fields) | set(ChatRequest.model_fields)
    own = {"prompt_token_ids", "extra_body_json", "proxy_call_id"}
    assert set(pb.GenerateRequest.DESCRIPTOR.fields_by_name) - own <= known


def test_the_three_kinds_of_prompt() -> None:
    def read(**fields: Any) -> GenerationRequest:
        return mapping.generation_request(pb.GenerateRequest(**fields))

    assert read(prompt="a") == parse(b'{"prompt": "a"}', CompletionRequest)
    assert read(prompt="") == parse(b'{"prompt": ""}', CompletionRequest)
    assert read(prompt_token_ids=[3, 4]) == parse(b'{"prompt": [3, 4]}', CompletionRequest)
    chat = read(messages=[pb.ChatMessage(role="user", content="hi")], logprobs=2)
    body = b'{"messages": [{"role": "user", "content": "hi"}], "logprobs": true, "top_logprobs": 2}'
    assert chat == parse(body, ChatRequest)


def test_a_message_may_be_empty_as_over_http() -> None:
    roles = ("system", "user", "assistant")
    chat = pb.GenerateRequest(messages=[pb.ChatMessage(role=role, content="") for role in roles])
    body = {"messages": [{"role": role, "content": ""} for role in roles]}
    assert mapping.generation_request(chat) == parse(json.dumps(body).encode(), ChatRequest)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(prompt="a", prompt_token_ids=[1]), "prompt_token_ids"),
        (pb.GenerateRequest(prompt="a", temperature=float("nan")), "temperature"),
        (pb.GenerateRequest(prompt="a", logit_bias={1: float("inf")}), "logit_bias"),
        (pb.GenerateRequest(prompt="a", slo=pb.Slo(ttft_ms=float("nan"))), "slo.ttft_ms"),
        (pb.GenerateRequest(prompt="a", slo=pb.Slo(e2e_ms=float("inf"))), "slo.e2e_ms"),
        (pb.GenerateRequest(prompt="a", slo=pb.Slo(tpot_ms=1, tpot_multiple="2x")), "slo.tpot_ms"),
        (pb.GenerateRequest(prompt="a", slo=pb.Slo(tpot_multiple="fast")), "slo.tpot_ms"),
        (pb.GenerateRequest(prompt="a", extra_body_json="{"), "extra_body_json"),
        (pb.GenerateRequest(prompt="a", extra_body_json="[]"), "extra_body_json"),
        (pb.GenerateRequest(prompt="a", extra_body_json='{"stream": true}'), "stream"),
        (pb.GenerateRequest(prompt="a", top_k=3, extra_body_json='{"top_k": 4}'), "top_k"),
        (pb.GenerateRequest(prompt="a", extra_body_json='{"colour": 1}'), "colour"),
        (pb.GenerateRequest(prompt="a", extra_body_json='{"request_id": "mine"}'), "request_id"),
        (
            pb.GenerateRequest(
                messages=[pb.ChatMessage(role="user", content="x")],
                logprobs=2,
                extra_body_json='{"top_logprobs": 5}',
            ),
            "top_logprobs",
        ),
        (pb.GenerateRequest(messages=[pb.ChatMessage(content="x")]), "messages.0.role"),
        (pb.GenerateRequest(messages=[pb.ChatMessage(role="judge", content="x")]), "messages.0.role"),
    ],
)
def test_nonsense_names_the_field(message: pb.GenerateRequest, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        mapping.generation_request(message)
    assert (caught.value.status, caught.value.param) == (400, param)
    code, details, trailing = mapping.status(caught.value)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert json.loads(dict(trailing)[mapping.ERROR_KEY])["param"] == param
    assert details == caught.value.message


def test_extra_fields_are_those_of_http() -> None:
    message = pb.GenerateRequest(extra_body_json='{"prompt": ["a", "b"], "user": "me"}', top_k=3)
    assert mapping.generation_request(message) == parse(
        b'{"prompt": ["a", "b"], "user": "me", "top_k": 3}', CompletionRequest
    )


@pytest.mark.parametrize(
    ("extra", "param", "code"),
    [
        ('{"temperature": NaN}', "extra_body_json", "invalid_json"),
        ('{"temperature": -Infinity}', "extra_body_json", "invalid_json"),
        ('{"user": "\\ud800"}', "extra_body_json", "invalid_json"),
        ("[" * 5000, "extra_body_json", "invalid_json"),
        ('{"top_p": 1e999}', "top_p", "invalid_value"),
        ('{"slo": {"tpot_ms": 1e999}}', "slo.tpot_ms", "invalid_value"),
        ('{"slo": 5}', "slo", "invalid_type"),
    ],
)
def test_extra_fields_that_json_or_http_would_refuse(extra: str, param: str, code: str) -> None:
    """Not written anew as null, which would sample at the default."""
    with pytest.raises(ApiError) as caught:
        mapping.generation_request(pb.GenerateRequest(prompt="a", extra_body_json=extra))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


def test_null_in_extra_fields_is_the_same_as_leaving_them_out() -> None:
    message = pb.GenerateRequest(
        messages=[pb.ChatMessage(role="user", content="hi")],
        extra_body_json='{"logprobs": null, "slo": null}',
    )
    assert mapping.generation_request(message) == parse(
        b'{"messages": [{"role": "user", "content": "hi"}], "logprobs": null, "slo": null}', ChatRequest
    )


def test_null_in_extra_fields_is_no_second_prompt_and_no_stream() -> None:
    extra = '{"messages": null, "prompt_token_ids": null, "stream": null, "top_k": null, "anything": null}'
    message = pb.GenerateRequest(prompt="a", top_k=3, extra_body_json=extra)
    assert mapping.generation_request(message) == parse(b'{"prompt": "a", "top_k": 3}', CompletionRequest)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (pb.GenerateRequest(prompt="a"), "GenerateRequest.999"),
        (pb.GenerateRequest(messages=[pb.ChatMessage(role="user", content="a")]), "ChatMessage.999"),
        (pb.GenerateRequest(prompt="a", slo=pb.Slo(tpot_ms=1)), "Slo.999"),
    ],
)
def test_fields_of_a_later_server_are_refused_as_over_http(message: pb.GenerateRequest, param: str) -> None:
    """Left out silently they would pass for an answer; protobuf keeps them, unnamed."""
    inner: Message = message
    if param.startswith("ChatMessage"):
        inner = message.messages[0]
    elif param.startswith("Slo"):
        inner = message.slo
    inner.MergeFromString(b"\xb8\x3e\x01")  # field 999 is 1
    with pytest.raises(ApiError) as caught:
        mapping.generation_request(message)
    assert (caught.value.param, caught.value.code) == (param, "unknown_parameter")


def test_status_tells_when_to_come_back_and_stays_within_metadata() -> None:
    code, _, trailing = mapping.status(not_ready("Gone.", retry_after_s=2.2))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert dict(trailing)[mapping.RETRY_KEY] == "3"
    code, details, trailing = mapping.status(ApiError(418, "é" * 5000))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert mapping.status(ApiError(599, "x"))[0] is grpc.StatusCode.INTERNAL
    assert sum(len(key) + len(value) for key, value in trailing) < 7000
    assert dict(trailing)[mapping.ERROR_KEY].isascii()
    assert len(details) < 5000


@pytest.mark.parametrize("character", ["🙂", "語", "%", "\0", '"'])
def test_an_error_fits_into_metadata_whatever_the_client_wrote(character: str) -> None:
    """Clients take 8 KiB, and else tell of an exhausted resource instead of what was wrong."""
    error = ApiError(400, character * 5000, param=f"a.{character * 5000}")
    _, details, trailing = mapping.status(error)
    percent_encoded = quote(details, safe=string.punctuation.replace("%", ""))
    assert len(percent_encoded) + sum(len(key) + len(value) for key, value in trailing) < 7500
    told = json.loads(dict(trailing)[mapping.ERROR_KEY])
    assert told["message"] == details == character * len(details)
    assert told["param"].startswith(f"a.{character * 30}")


def test_metadata_that_came_twice_is_neither() -> None:
    """As headers of HTTP are joined: which of two API keys counts would be unclear."""
    pairs = (("authorization", "Bearer a"), ("x", "1"), ("authorization", "Bearer b"), ("bin-bin", b"\x01"))
    context = SimpleNamespace(invocation_metadata=lambda: pairs)
    assert mapping.metadata_of(context) == {"authorization": "Bearer a, Bearer b", "x": "1"}
    assert mapping.metadata_of(SimpleNamespace(invocation_metadata=lambda: None)) == {}
