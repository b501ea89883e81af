"""How long answers may be whose client named no bound, and what is reckoned with for them meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml

from cluster.grpc_config import GrpcConfig
from cluster.security_config import SecurityConfig
from cluster.stream_messages import Submit
from cluster.tier_config import TierConfig
from deployments.api_keys import hash_key, new_key
from deployments.api_service import ApiService
from deployments.authentication import Authenticator
from deployments.grpc_server import make_server
from deployments.openai_api import create_app
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from deployments.proto.flotilla.v1 import generation_pb2_grpc as pb_grpc
from deployments.sampling_mapping import ASSUMED_MAX_TOKENS
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import codec

CHAT, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
WINDOW = 131_072
ENDLESS = 6000  # tokens of an answer that goes on beyond what is assumed
KEY = new_key()


@pytest.fixture
async def cell() -> AsyncIterator[CellStandIn]:
    stand_in = CellStandIn(lambda submit: [80] * min(ENDLESS, submit.sampling.max_tokens), max_tokens=WINDOW)
    stand_in.per_step = 500
    yield stand_in
    await stand_in.close()


async def asked(http: httpx.AsyncClient, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    said = {"input": "hello"} if path == RESPONSES else {"messages": MESSAGES}
    response = await http.post(path, json=({"prompt": "hello"} if path == COMPLETIONS else said) | fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


def left(submit: Submit) -> int:
    return WINDOW - len(submit.prompt)


@pytest.mark.api("chat.completions", "max_tokens")
async def test_a_chat_may_go_on_to_the_end_of_the_window(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    body = await asked(http)
    assert body["usage"]["completion_tokens"] == ENDLESS
    (submit,) = cell.submissions
    assert submit.sampling.max_tokens == left(submit)
    assert submit.assumed_tokens == submit.num_reckoned == ASSUMED_MAX_TOKENS


async def test_a_response_without_a_bound_is_not_cut(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    cell.script = lambda submit: [*[80] * ENDLESS, *codec().eos_ids]
    body = await asked(http, RESPONSES)
    assert (body["status"], body["incomplete_details"]) == ("completed", None)
    assert cell.submissions[-1].sampling.max_tokens == left(cell.submissions[-1])
    streamed = await http.post(RESPONSES, json={"input": "hello", "stream": True})
    assert "event: response.completed" in streamed.text
    assert "response.incomplete" not in streamed.text


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_default_bounds_those_that_name_none(
    http: httpx.AsyncClient, cell: CellStandIn, path: str
) -> None:
    cell.default_max_tokens = 5000
    await asked(http, path)
    assert (cell.submissions[-1].sampling.max_tokens, cell.submissions[-1].num_reckoned) == (5000, 4096)
    name = "max_tokens" if path == CHAT else "max_output_tokens"
    await asked(http, path, **{name: 5500})
    assert (cell.submissions[-1].sampling.max_tokens, cell.submissions[-1].num_reckoned) == (5500, 5500)
    assert cell.submissions[-1].assumed_tokens is None


async def test_a_default_beyond_the_window_is_what_is_left_of_it(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    cell.default_max_tokens = 2 * WINDOW
    await asked(http)
    assert cell.submissions[-1].sampling.max_tokens == left(cell.submissions[-1])


async def test_completions_keep_openai_s_16(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    cell.default_max_tokens = 5000
    await asked(http, COMPLETIONS)
    assert cell.submissions[-1].sampling.max_tokens == cell.submissions[-1].num_reckoned == 16


async def test_over_grpc_it_is_the_same(service: ApiService, cell: CellStandIn, free_port: int) -> None:
    server = make_server(GrpcConfig(enabled=True, port=free_port), service)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port}") as channel:
        stub: Any = pb_grpc.GenerationStub(channel)
        message = pb.ChatMessage(role="user", content="hello")
        await stub.Generate(pb.GenerateRequest(messages=[message]))
        await stub.Generate(pb.GenerateRequest(prompt="hello"))
    await server.stop(None)
    chat, completion = cell.submissions
    assert (chat.sampling.max_tokens, completion.sampling.max_tokens) == (left(chat), 16)


@pytest.mark.api("chat.completions", "slo", "min_tokens")
async def test_a_time_for_the_whole_answer_bounds_it(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    """Else it would be held to be a time for 131,072 tokens, and refused as one that nothing could keep."""
    for fields in ({"slo": {"e2e_ms": 60_000}}, {"slo": {"e2e_ms": "2x"}}):
        await asked(http, **fields)
        assert cell.submissions[-1].sampling.max_tokens == ASSUMED_MAX_TOKENS
    await asked(http, slo={"e2e_ms": 60_000}, min_tokens=5000)
    assert cell.submissions[-1].sampling.max_tokens == 5000
    await asked(http, slo={"e2e_ms": 60_000}, max_tokens=9000)
    assert cell.submissions[-1].sampling.max_tokens == 9000
    await asked(http, slo={"tpot_ms": 50, "ttft_ms": 900})
    assert cell.submissions[-1].sampling.max_tokens == left(cell.submissions[-1])


async def test_so_does_that_of_a_tier_or_of_one_to_fall_back_to(
    http: httpx.AsyncClient, service: ApiService, cell: CellStandIn
) -> None:
    tiers = {"slow": TierConfig(e2e_ms=60_000), "quick": TierConfig(ttft_ms=100, downgrade_to="slow")}
    service._tiers = tiers
    for fields in ({"service_tier": "slow"}, {"service_tier": "quick", "slo": {"on_miss": "downgrade"}}):
        await asked(http, **fields)
        assert cell.submissions[-1].sampling.max_tokens == ASSUMED_MAX_TOKENS, fields
    await asked(http, service_tier="quick", slo={"on_miss": "serve"})
    assert cell.submissions[-1].sampling.max_tokens == left(cell.submissions[-1])


@pytest.mark.api("chat.completions", "truncate_prompt_tokens", "min_tokens")
async def test_a_prompt_cut_to_fit_leaves_room_for_what_is_assumed(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    messages = [{"role": "user", "content": "\N{SNOWMAN}" * 6000}]  # three tokens each
    cell.max_tokens = window = 1 << 14
    await asked(http, messages=messages, truncate_prompt_tokens=-1)
    assert len(cell.submissions[-1].prompt) == window - ASSUMED_MAX_TOKENS
    await asked(http, messages=messages, truncate_prompt_tokens=-1, min_tokens=6000)
    assert len(cell.submissions[-1].prompt) == window - 6000


async def test_a_default_below_that_is_what_is_assumed(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    cell.max_tokens, cell.default_max_tokens = 1 << 14, 300
    messages = [{"role": "user", "content": "\N{SNOWMAN}" * 6000}]
    await asked(http, messages=messages, truncate_prompt_tokens=-1)
    (submit,) = cell.submissions
    assert (len(submit.prompt), submit.sampling.max_tokens) == (cell.max_tokens - 300, 300)


async def test_a_key_pays_what_was_assumed_at_first_and_what_was_used_in_the_end(
    service: ApiService, cell: CellStandIn, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    limited = {"name": "one", "hash": hash_key(KEY), "limits": {"tokens_per_minute": 10_000}}
    keys.write_text(yaml.safe_dump({"keys": [limited]}))
    authenticator = Authenticator(SecurityConfig(keys_file=keys), environment={}, clock=lambda: 100.0)
    app = create_app(service, max_body_bytes=20_000, authenticator=authenticator)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://cell", headers=headers) as http:

        async def remaining() -> int:
            answer = await http.post("/tokenize", json={"prompt": "x"})
            return int(answer.headers["x-ratelimit-remaining-tokens"])

        body = await asked(http)  # the window has more tokens than the key
        assert await remaining() == 10_000 - body["usage"]["total_tokens"]
        refused = await http.post(CHAT, json={"messages": MESSAGES})
        assert refused.status_code == 429  # for what is assumed, which is above the rest
        assert (await http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 3000})).status_code == 200
    await app.state.answers.close()
