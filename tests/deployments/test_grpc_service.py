"""The gRPC service without a server around it: what it answers, refuses and counts as HTTP does."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.security_config import SecurityConfig
from deployments.api_keys import hash_key
from deployments.api_service import ApiService
from deployments.authentication import Authenticator
from deployments.errors import ApiError
from deployments.front_end_metrics import FrontEndMetrics
from deployments.grpc_service import GenerationService
from deployments.proto.flotilla.v1 import generation_pb2 as pb

HI = pb.GenerateRequest(prompt="hi", max_tokens=4)
KEY = "a-key-that-is-long-enough"


@pytest.fixture
def authenticator(tmp_path: Path) -> Authenticator:
    """Of a server that knows one key."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{name: team, hash: '{hash_key(KEY)}'}}]")
    return Authenticator(SecurityConfig(keys_file=keys), environment={})


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_the_logprobs_of_an_echoed_prompt_are_streamed_as_over_http(
    service: ApiService, max_tokens: int
) -> None:
    """They were computed, and left out of every chunk."""
    grpc = GenerationService(service)
    request = pb.GenerateRequest(prompt="hi there", echo=True, logprobs=2, max_tokens=max_tokens)
    (whole,) = (await grpc.generate(request, {})).choices
    chunks = [chunk.choice async for chunk in grpc.generate_stream(request, {})]
    assert len(whole.prompt_logprobs) == 5
    assert list(chunks[0].prompt_logprobs) == list(whole.prompt_logprobs)
    assert not any(choice.prompt_logprobs for choice in chunks[1:])
    assert [entry for choice in chunks for entry in choice.logprobs] == list(whole.logprobs)


async def test_tokens_in_logprobs_are_told_as_ids_where_that_is_asked_for(service: ApiService) -> None:
    """It was taken, and told nobody that it did nothing here."""
    grpc = GenerationService(service)
    asked = '{"return_tokens_as_token_ids": true}'
    request = pb.GenerateRequest(prompt="hi", logprobs=1, max_tokens=3, extra_body_json=asked)
    whole = (await grpc.generate(request, {})).choices[0].logprobs
    streamed = [entry async for chunk in grpc.generate_stream(request, {}) for entry in chunk.choice.logprobs]
    assert streamed == list(whole)
    assert [entry.token for entry in whole] == [f"token_id:{entry.token_id}" for entry in whole]
    for other in whole[0].top_logprobs:
        assert other.token == f"token_id:{other.token_id}"


async def test_a_key_may_come_in_either_way_that_its_refusal_names(
    service: ApiService, authenticator: Authenticator
) -> None:
    """Whoever did as that said, and sent it as `x-api-key`, was told the same again."""
    grpc = GenerationService(service, authenticator=authenticator)
    for metadata in ({"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}):
        assert (await grpc.generate(HI, metadata)).choices[0].text
    # One that is meant for a gateway before us counts for nothing beside ours.
    for wrong in ({"x-api-key": "another"}, {"x-api-key": KEY, "authorization": "Bearer another"}, {}):
        with pytest.raises(ApiError, match="x-api-key") as refused:
            await grpc.generate(HI, wrong)
        assert refused.value.status == 401


async def test_calls_about_the_server_are_counted_and_refused_in_the_log_as_all_others(
    service: ApiService, authenticator: Authenticator, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys could be tried by them and nothing told of it."""
    metrics = FrontEndMetrics("fe-1")
    grpc = GenerationService(service, metrics, authenticator=authenticator)
    with caplog.at_level("INFO", "deployments.refusals"):
        for call in (grpc.list_models, grpc.describe):
            with pytest.raises(ApiError):
                await call({"authorization": "Bearer guessed", "x-request-id": "g-1"})
            await call({"authorization": f"Bearer {KEY}"})
    told = [vars(record)["fields"] for record in caplog.records]
    assert [(one["method"], one["code"], one["request_id"]) for one in told] == [
        ("ListModels", "invalid_api_key", "g-1"),
        ("Describe", "invalid_api_key", "g-1"),
    ]
    counted = metrics.render()
    assert 'errors_total{api="grpc",code="invalid_api_key",front_end="fe-1"} 2.0' in counted
    for method in ("ListModels", "Describe"):
        for code in ("OK", "UNAUTHENTICATED"):
            assert f'calls_total{{code="{code}",front_end="fe-1",method="{method}"}} 1.0' in counted
