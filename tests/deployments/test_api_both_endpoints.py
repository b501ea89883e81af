"""Fields that completions and chats have in common, shown at both."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import ANSWER, codec, ids

BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 100},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100},
}
both = pytest.mark.parametrize("path", sorted(BASES))


async def answered(http: httpx.AsyncClient, path: str, **fields: Any) -> dict[str, Any]:
    response = await http.post(path, json=BASES[path] | fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


def text_of(body: dict[str, Any], choice: int = 0) -> str:
    found = body["choices"][choice]
    return str(found["text"] if "text" in found else found["message"]["content"])


def streamed_text(response: httpx.Response) -> str:
    bodies = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [choice for body in bodies for choice in body["choices"]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices
    )


SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.2,
    "seed": 11,
    "max_tokens": 30,
    "min_tokens": 2,
}


@both
@pytest.mark.parametrize("name", sorted(SAMPLING))
@pytest.mark.api(
    "completions", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "max_tokens", "min_tokens",
)  # fmt: skip
@pytest.mark.api(
    "chat.completions", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "max_tokens", "min_tokens",
)  # fmt: skip
async def test_each_sampling_field_reaches_the_cell_and_changes_no_other(
    http: httpx.AsyncClient, cell: CellStandIn, path: str, name: str
) -> None:
    await answered(http, path, seed=1)
    await answered(http, path, **({"seed": 1} | {name: SAMPLING[name]}))
    plain, changed = (submission.sampling for submission in cell.submissions)
    different = {
        field for field in plain.__struct_fields__ if getattr(plain, field) != getattr(changed, field)
    }
    assert different == {name}
    assert getattr(changed, name) == SAMPLING[name]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}),
    ],
)
@pytest.mark.api("completions", "top_p")
@pytest.mark.api("chat.completions", "top_p")
@pytest.mark.api("responses", "top_p")
@pytest.mark.api("messages", "top_p")
async def test_a_top_p_of_0_takes_the_most_probable_token(
    http: httpx.AsyncClient, cell: CellStandIn, path: str, body: dict[str, Any]
) -> None:
    response = await http.post(path, json=body | {"top_p": 0, "temperature": 1})
    assert response.status_code == 200, response.text
    (sent,) = cell.submissions
    assert (sent.sampling.top_p, sent.sampling.is_greedy) == (0.0, True)


@both
@pytest.mark.api("completions", "logit_bias", "stop_token_ids", "ignore_eos")
@pytest.mark.api("chat.completions", "logit_bias", "stop_token_ids", "ignore_eos")
async def test_token_ids(http: httpx.AsyncClient, cell: CellStandIn, path: str) -> None:
    (comma,) = ids(",")
    cell.script = lambda submit: [*ids("one, two"), *codec().eos_ids, *ids(" three")]
    body = await answered(http, path, stop_token_ids=[comma], logit_bias={"17": -5})
    assert text_of(body) == "one"
    assert body["choices"][0]["stop_reason"] == comma
    assert cell.submissions[-1].sampling.logit_bias == {17: -5.0}
    assert text_of(await answered(http, path, ignore_eos=True)) == "one, two three"
    assert text_of(await answered(http, path)) == "one, two"


@both
@pytest.mark.api("completions", "stop", "include_stop_str_in_output", "skip_special_tokens")
@pytest.mark.api("chat.completions", "stop", "include_stop_str_in_output", "skip_special_tokens")
async def test_texts(http: httpx.AsyncClient, cell: CellStandIn, path: str) -> None:
    assert text_of(await answered(http, path, stop=["zzz", "🙂"])) == "the café "
    included = await answered(http, path, stop="🙂", include_stop_str_in_output=True)
    assert text_of(included) == "the café 🙂"
    cell.script = lambda submit: [*ids("a"), *codec().eos_ids, *ids("b")]
    shown = await answered(http, path, ignore_eos=True, skip_special_tokens=False)
    assert text_of(shown) == "a<|end|>b"


@both
@pytest.mark.api("completions", "n", "seed", "return_token_ids", "model", "prompt")
@pytest.mark.api("chat.completions", "n", "seed", "return_token_ids", "model")
async def test_choices(http: httpx.AsyncClient, cell: CellStandIn, path: str) -> None:
    cell.script = lambda submit: ids(f"seed {submit.sampling.seed}")
    body = await answered(http, path, n=3, seed=70, return_token_ids=True, model="demo")
    assert [text_of(body, choice) for choice in range(3)] == ["seed 70", "seed 71", "seed 72"]
    assert [choice["token_ids"] for choice in body["choices"]] == [ids(f"seed {70 + i}") for i in range(3)]
    shown = body.get("prompt_token_ids") or body["choices"][0]["prompt_token_ids"]
    assert shown == cell.submissions[0].prompt


@pytest.mark.api("completions", "prompt", "n", "seed")
async def test_choices_of_several_prompts(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    """A list of equal prompts is one way to ask for several samples: no two of them have the same seed."""
    cell.script = lambda submit: ids(f"seed {submit.sampling.seed}")
    path = "/v1/completions"
    body = await answered(http, path, prompt=["a", "a"], n=2, seed=70)
    assert [text_of(body, choice) for choice in range(4)] == [f"seed {70 + i}" for i in range(4)]
    last, least = (1 << 63) - 1, -1 << 63
    body = await answered(http, path, prompt=["a", "a"], seed=last)
    assert [text_of(body, choice) for choice in range(2)] == [f"seed {last}", f"seed {least}"]
    assert text_of(await answered(http, path, prompt=["a"], seed=least)) == f"seed {least}"
    await answered(http, path, prompt=["a"] * 4)
    assert len({submission.sampling.seed for submission in cell.submissions[-4:]}) == 4


@both
@pytest.mark.api("completions", "priority", "service_tier", "slo", "speculation", "request_id")
@pytest.mark.api("chat.completions", "priority", "service_tier", "slo", "speculation", "request_id")
async def test_service(http: httpx.AsyncClient, cell: CellStandIn, path: str) -> None:
    fields = {
        "priority": -3,
        "service_tier": "fast",
        "slo": {"tpot_ms": 7},
        "speculation": {"mode": "off", "drafters": ["lookup"], "max_tokens": 4},
        "request_id": "r-1",
    }
    response = await http.post(path, json=BASES[path] | fields)
    assert response.headers["x-request-id"] == "r-1"
    assert response.json()["service_tier"] == "fast"
    (sent,) = cell.submissions
    assert (sent.priority, sent.tier) == (-3, "fast")
    assert (sent.objective.tpot_ms, sent.objective.ttft_ms) == (7, 100)
    assert (sent.speculation.mode, sent.speculation.drafters, sent.speculation.max_tokens) == (
        "off",
        ("lookup",),
        4,
    )


@pytest.mark.api("chat.completions", "logprobs", "top_logprobs")
async def test_chat_log_probabilities(http: httpx.AsyncClient) -> None:
    body = await answered(http, "/v1/chat/completions", logprobs=True, top_logprobs=2, max_tokens=3)
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-0.25] * 3
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 3
    assert b"".join(bytes(entry["bytes"]) for entry in content) in ANSWER.encode()
    body = await answered(http, "/v1/chat/completions", logprobs=True, max_tokens=3)
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


@both
@pytest.mark.api("completions", "stream")
@pytest.mark.api("chat.completions", "stream")
async def test_a_stream_adds_up_to_the_whole(http: httpx.AsyncClient, path: str) -> None:
    whole = text_of(await answered(http, path))
    response = await http.post(path, json=BASES[path] | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")
    assert response.text.count("data: {") > 3
    assert streamed_text(response) == whole


@both
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.api("completions", "min_tokens", "stop")
@pytest.mark.api("chat.completions", "min_tokens", "stop")
async def test_no_stop_string_ends_an_answer_before_its_least_tokens(
    http: httpx.AsyncClient, cell: CellStandIn, path: str, stream: bool
) -> None:
    cell.script = lambda submit: [*ids("a"), *ids("x"), *ids("b"), *ids("x"), *ids("c")]
    for min_tokens, text in ((0, "a"), (1, "a"), (2, "axb"), (3, "axb"), (4, "axbxc")):
        body = BASES[path] | {"stop": "x", "min_tokens": min_tokens, "stream": stream}
        response = await http.post(path, json=body)
        assert response.status_code == 200, response.text
        assert (streamed_text(response) if stream else text_of(response.json())) == text
