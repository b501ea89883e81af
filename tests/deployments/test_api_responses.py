"""Whole and streamed responses of the API over a stand-in cell."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import ANSWER, codec, ids

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "demo", "prompt": "hello", "max_tokens": 100}


def events(body: str) -> list[Any]:
    """Data of each server-sent event; `[DONE]` stays a string."""
    found = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [data if data == "[DONE]" else json.loads(data) for data in found]


async def test_chat(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    response = await http.post("/v1/chat/completions", json=CHAT | {"slo": {"tpot_ms": 3, "ttft_ms": 4}})
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] is None
    num_tokens = len(ids(ANSWER)) + 1
    assert body["usage"] == {
        "prompt_tokens": len(cell.submissions[0].prompt),
        "completion_tokens": num_tokens,
        "total_tokens": len(cell.submissions[0].prompt) + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    metrics = body["metrics"]
    assert metrics["time_to_first_token_ms"] == 5.0
    assert metrics["tpot_ms"] == metrics["mean_itl_ms"] == 2.0
    assert metrics["e2e_ms"] == 5.0 + 2.0 * (num_tokens - 1)
    assert metrics["slo"] == {
        "tpot_ms": 3,
        "ttft_ms": 4,
        "e2e_ms": None,
        "met": False,
        "tpot_met": True,
        "ttft_met": False,
        "e2e_met": None,
    }
    assert metrics["drafters"] == {"small": 6, "lookup": 2}
    assert metrics["speculative_decoding"] == {
        "mean_acceptance_length": min(4 + 8, num_tokens) / 4,
        "draft_acceptance_rate": round(8 / 12, 3),
        "num_spec_steps": 4,
        "num_draft_tokens": 20,
        "num_verified_tokens": 12,
        "num_accepted_draft_tokens": 8,
        "acceptance_by_depth": [4, 3, 1],
    }
    assert isinstance(metrics["seed"], int)
    assert cell.submissions[0].sampling.seed == metrics["seed"]


async def test_chat_prompt_follows_the_template(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "you"}]},
    ]
    await http.post("/v1/chat/completions", json={"messages": messages})
    text = codec().decode(cell.submissions[0].prompt, skip_special_tokens=False)
    assert text == "<|bos|><|system|>be brief<|end|><|user|>hello\nyou<|end|><|assistant|>"


async def test_completion_of_several_prompts_and_choices(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    cell.script = lambda submit: ids(f"{len(submit.prompt)}/{submit.sampling.seed}")
    body = (
        await http.post("/v1/completions", json=COMPLETION | {"prompt": ["a", [9, 9, 9]], "n": 2, "seed": 70})
    ).json()
    assert [choice["text"] for choice in body["choices"]] == ["2/70", "2/71", "3/72", "3/73"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 2 + 3
    assert body["metrics"]["seed"] == 70


async def test_default_length_is_openais(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    body = (await http.post("/v1/completions", json={"prompt": "x"})).json()
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"
    await http.post("/v1/chat/completions", json=CHAT)
    chat = cell.submissions[-1]
    assert chat.sampling.max_tokens == cell.max_tokens - len(chat.prompt)


@pytest.mark.parametrize("per_step", [1, 2, 50])
async def test_stop_string_cuts_exactly(http: httpx.AsyncClient, cell: CellStandIn, per_step: int) -> None:
    cell.per_step = per_step
    body = (await http.post("/v1/completions", json=COMPLETION | {"stop": [" add(", "zzz"]})).json()
    assert body["choices"][0]["text"] == ANSWER.partition(" add(")[0]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] == " add("
    # Counted to the token that completed the stop string, whatever the step sizes were.
    counted = body["usage"]["completion_tokens"]
    tokens = ids(ANSWER)
    assert " add(" in codec().decode(tokens[:counted])
    assert " add(" not in codec().decode(tokens[: counted - 1])
    included = await http.post(
        "/v1/completions", json=COMPLETION | {"stop": " add(", "include_stop_str_in_output": True}
    )
    assert included.json()["choices"][0]["text"] == ANSWER.partition(" add(")[0] + " add("


async def test_chat_stream(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    response = await http.post(
        "/v1/chat/completions", json=CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(ids(ANSWER)) + 1
    assert chunks[-1]["metrics"]["drafters"] == {"small": 6, "lookup": 2}
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


async def test_stream_counts_tokens_on_request(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = COMPLETION | {"stream": True, "stream_options": options, "n": 2}
    *chunks, _ = events((await http.post("/v1/completions", json=body)).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == 2 * (len(ids(ANSWER)) + 1)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {len(cell.submissions[0].prompt)}


async def test_the_first_chunk_of_a_chat_counts_tokens_too(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = CHAT | {"stream": True, "stream_options": options}
    *chunks, _ = events((await http.post("/v1/chat/completions", json=body)).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0
    assert counts == sorted(counts)


async def test_completion_stream_ends_with_metrics(http: httpx.AsyncClient) -> None:
    body = COMPLETION | {"stream": True, "n": 3, "echo": True}
    *chunks, done = events((await http.post("/v1/completions", json=body)).text)
    assert done == "[DONE]"
    for index in range(3):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "hello" + ANSWER
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["stop"]
    assert ["metrics" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


async def test_chat_logprobs(http: httpx.AsyncClient) -> None:
    body = (await http.post("/v1/chat/completions", json=CHAT | {"logprobs": True, "top_logprobs": 2})).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    data = b"".join(bytes(item["bytes"]) for item in content[:-1])
    assert data.decode() == ANSWER
    assert all(len(item["top_logprobs"]) == 2 for item in content)
    assert content[0]["top_logprobs"][0] == {
        "token": content[0]["token"],
        "logprob": -0.25,
        "bytes": content[0]["bytes"],
    }


async def test_completion_logprobs(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    cell.script = lambda submit: ids("the dog does not mind")
    for stream in (False, True):
        response = await http.post("/v1/completions", json=COMPLETION | {"logprobs": 1, "stream": stream})
        bodies = events(response.text)[:-1] if stream else [response.json()]
        parts = [choice["logprobs"] for body in bodies for choice in body["choices"]]
        tokens = [token for part in parts for token in part["tokens"]]
        offsets = [offset for part in parts for offset in part["text_offset"]]
        assert "".join(tokens) == "the dog does not mind"
        assert offsets == [len("".join(tokens[:index])) for index in range(len(tokens))]
        assert all(value == -0.25 for part in parts for value in part["token_logprobs"])
        assert all(
            top == {token: -0.25}
            for part in parts
            for token, top in zip(part["tokens"], part["top_logprobs"], strict=True)
        )


async def test_token_ids_are_returned_on_request(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    for stream in (False, True):
        response = await http.post(
            "/v1/completions", json=COMPLETION | {"return_token_ids": True, "stream": stream}
        )
        bodies = events(response.text)[:-1] if stream else [response.json()]
        choices = [choice for body in bodies for choice in body["choices"]]
        assert [token for choice in choices for token in choice["token_ids"]] == [
            *ids(ANSWER),
            *codec().eos_ids,
        ]
        assert choices[0]["prompt_token_ids"] == cell.submissions[0].prompt


async def test_ignore_eos_and_special_tokens(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    (eos,) = codec().eos_ids
    cell.script = lambda submit: [*ids("a"), eos, *ids("b")]
    body = (await http.post("/v1/completions", json=COMPLETION | {"ignore_eos": True})).json()
    assert body["choices"][0]["text"] == "ab"
    assert cell.submissions[-1].sampling.stop_token_ids == ()
    body = (
        await http.post(
            "/v1/completions", json=COMPLETION | {"ignore_eos": True, "skip_special_tokens": False}
        )
    ).json()
    assert body["choices"][0]["text"] == "a<|end|>b"


async def test_stop_token_is_named_and_hidden(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    (comma,) = ids(",")
    body = (await http.post("/v1/completions", json=COMPLETION | {"stop_token_ids": [comma]})).json()
    assert body["choices"][0]["text"] == ANSWER.partition(",")[0]
    assert body["choices"][0]["stop_reason"] == comma


async def test_tier_and_fields_reach_the_cell(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    fields = {
        "service_tier": "fast",
        "slo": {"tpot_ms": 7},
        "priority": -3,
        "speculation": {"mode": "off", "drafters": ["lookup"], "max_tokens": 4},
        "temperature": 0,
        "top_k": -1,
        "top_p": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "logit_bias": {"17": -100},
        "seed": 5,
        "min_tokens": 2,
    }
    body = (await http.post("/v1/completions", json=COMPLETION | fields)).json()
    assert body["service_tier"] == "fast"
    sent = cell.submissions[0]
    assert (sent.tier, sent.priority) == ("fast", -3)
    assert (sent.objective.tpot_ms, sent.objective.ttft_ms) == (7, 100)
    assert (sent.speculation.mode, sent.speculation.drafters, sent.speculation.max_tokens) == (
        "off",
        ("lookup",),
        4,
    )
    sampling = sent.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0, 0, 0.5, 0.1)
    assert (sampling.logit_bias, sampling.seed, sampling.min_tokens) == ({17: -100.0}, 5, 2)


async def test_service_routes(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    models = (await http.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["demo"]
    assert (await http.get("/v1/models/demo")).json()["max_model_len"] == cell.max_tokens
    assert (await http.get("/v1/models/other")).status_code == 404
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/ready")).status_code == 200
    assert [(await http.request(method, "/ping")).status_code for method in ("GET", "POST")] == [200, 200]
    assert "flotilla_requests_total 1" in (await http.get("/metrics")).text
    assert (await http.get("/version")).json()["version"]
    assert "tpot_ms" in (await http.get("/openapi.json")).text
    cell.ready = False
    response = await http.get("/ready")
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert (await http.get("/ping")).status_code == 503
    assert (await http.get("/health")).status_code == 200


async def test_request_id_is_returned(http: httpx.AsyncClient) -> None:
    headers = {"X-Request-Id": "mine-1"}
    assert (await http.get("/health", headers=headers)).headers["x-request-id"] == "mine-1"
    hostile = {"X-Request-Id": "mine; drop"}
    assert (await http.get("/health", headers=hostile)).headers["x-request-id"].startswith("req-")
    response = await http.post("/v1/completions", json=COMPLETION | {"request_id": "body-2"})
    assert response.headers["x-request-id"] == "body-2"
