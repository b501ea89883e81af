"""The gRPC service without a server around it: what it answers, refuses and counts as HTTP does."""

from __future__ import annotations

import pytest

from deployments.api_service import ApiService
from deployments.grpc_service import GenerationService
from deployments.proto.flotilla.v1 import generation_pb2 as pb


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
