"""Fields of prompts and of tokens, of vLLM's and OpenAI's, over a stand-in cell."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import httpx
import pytest

from cluster.stream_messages import Submit
from deployments.openai_schema import NEUTRAL_VALUES, ChatRequest, CompletionRequest
from deployments.sampling_mapping import (
    ASSUMED_MAX_TOKENS,
    COMPLETION_MAX_TOKENS,
    CellInfo,
    reserved_tokens,
)
from deployments.text_codec import TextCodec
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import ANSWER, codec, ids

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


async def completed(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await http.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 100, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


async def chatted(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await http.post(CHAT, json={"messages": MESSAGES, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


@pytest.mark.api("completions", "allowed_token_ids", "bad_words")
@pytest.mark.api("chat.completions", "allowed_token_ids", "bad_words")
async def test_ruled_out_tokens_reach_the_cell(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    fields = {"allowed_token_ids": [40, 41], "bad_words": ["dog", "lazy dog"]}
    await completed(http, **fields)
    await chatted(http, **fields)
    for submission in cell.submissions:
        assert submission.sampling.allowed_token_ids == (40, 41)
        texts = {codec().decode(list(word)) for word in submission.sampling.bad_words}
        assert {"dog", "lazy dog"} <= texts <= {"dog", " dog", "lazy dog", " lazy dog"}


@pytest.mark.api("completions", "allowed_token_ids", "bad_words")
async def test_nothing_left_to_choose_is_refused(http: httpx.AsyncClient) -> None:
    (comma,) = ids(",")
    for fields in (
        {"allowed_token_ids": [comma], "bad_words": [","]},
        {"allowed_token_ids": [comma], "min_tokens": 2, "stop_token_ids": [comma]},
        {"allowed_token_ids": [100_000]},
        {"allowed_token_ids": []},
    ):
        response = await http.post(COMPLETIONS, json={"prompt": "a", **fields})
        assert response.status_code == 400, fields
        assert response.json()["error"]["param"] == "allowed_token_ids"


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt_logprobs": 2},
        {"echo": True, "logprobs": 2},
        {"echo": True, "logprobs": 2, "stream": True},
    ],
)
async def test_those_of_a_long_prompt_keep_no_other_stream_waiting(
    http: httpx.AsyncClient, cell: CellStandIn, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    """Written on the event loop, those of 32,000 tokens stopped all others for seconds."""
    named_by: Counter[int] = Counter()
    token_text = TextCodec.token_text

    def noted(self: TextCodec, token: int) -> str:
        named_by[threading.get_ident()] += 1
        return token_text(self, token)

    monkeypatch.setattr(TextCodec, "token_text", noted)
    cell.max_tokens = 4096
    response = await http.post("/v1/completions", json={"prompt": [50] * 2000, "max_tokens": 4, **asked})
    assert response.status_code == 200, response.text
    assert response.text.count("logprob") > 0
    elsewhere = sum(number for thread, number in named_by.items() if thread != threading.get_ident())
    assert elsewhere >= 2000
    assert named_by[threading.get_ident()] < 100


@pytest.mark.api("completions", "prompt_logprobs")
@pytest.mark.api("chat.completions", "prompt_logprobs")
async def test_prompt_logprobs_as_vllm_shows_them(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    body = await completed(http, prompt=[50, 51, 52], prompt_logprobs=2)
    assert cell.submissions[0].sampling.prompt_logprobs == 2
    first, *rest = body["choices"][0]["prompt_logprobs"]
    assert first is None
    assert [next(iter(entry)) for entry in rest] == ["51", "52"]
    assert rest[0]["51"] == {"logprob": -0.25, "rank": 1, "decoded_token": codec().token_text(51)}
    assert len(rest[0]) == 2
    body = await completed(http, prompt=[50, 51], prompt_logprobs=0)
    (entry,) = body["choices"][0]["prompt_logprobs"][1:]
    assert entry["51"]["rank"] == 1
    body = await chatted(http, prompt_logprobs=0)
    assert len(body["prompt_logprobs"]) == len(cell.submissions[-1].prompt)
    for path, base in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES})):
        response = await http.post(path, json={**base, "prompt_logprobs": 1, "stream": True})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.api("completions", "echo", "logprobs", "max_tokens")
async def test_echo_with_logprobs_scores_the_prompt(
    http: httpx.AsyncClient, cell: CellStandIn, stream: bool
) -> None:
    prompt = ids("the quick dog")
    request = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0, "stream": stream}
    response = await http.post(COMPLETIONS, json=request)
    assert response.status_code == 200, response.text
    if stream:
        bodies = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    else:
        bodies = [response.json()]
        assert bodies[0]["usage"]["completion_tokens"] == 0
    choices = [choice for body in bodies for choice in body["choices"]]
    assert "".join(choice["text"] for choice in choices) == "the quick dog"
    assert choices[-1]["finish_reason"] == "length"
    shown = [choice["logprobs"] for choice in choices]
    assert "".join(name for one in shown for name in one["tokens"]) == "the quick dog"
    values = [value for one in shown for value in one["token_logprobs"]]
    assert values == [None] + [-0.25] * (len(prompt) - 1)
    assert shown[0]["top_logprobs"][0] is None
    assert shown[0]["text_offset"][:2] == [0, len(codec().token_text(prompt[0]))]
    assert cell.submissions[0].sampling.max_tokens == 1


@pytest.mark.api("completions", "echo", "logprobs")
async def test_echo_with_logprobs_goes_on_with_the_answer(http: httpx.AsyncClient) -> None:
    body = await completed(http, prompt="the dog", echo=True, logprobs=1, max_tokens=1)
    shown = body["choices"][0]["logprobs"]
    start = codec().decode(ids(ANSWER)[:1])
    assert body["choices"][0]["text"] == "the dog" + start
    # The tokenizer's own first token is part of the prompt, and has no text in `text`.
    assert "".join(shown["tokens"][1:]) == "the dog" + start
    assert shown["token_logprobs"][0] is None
    assert shown["token_logprobs"][1:] == [-0.25] * (len(shown["tokens"]) - 1)
    assert "max_tokens" in (await http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 0})).text


@pytest.mark.parametrize("prompt", ["", [1], [1, 4]])
async def test_a_prompt_that_shows_no_text_is_scored_too(http: httpx.AsyncClient, prompt: Any) -> None:
    body = await completed(http, prompt=prompt, echo=True, logprobs=1, max_tokens=1)
    shown = body["choices"][0]["logprobs"]
    num_prompt = len(prompt or [1])
    assert shown["token_logprobs"] == [None] + [-0.25] * num_prompt
    assert shown["text_offset"] == [0] * (num_prompt + 1)


@pytest.mark.parametrize(("of_prompt", "of_answer"), [(1, 3), (3, 1), (0, 2)])
async def test_prompt_and_answer_have_as_many_alternatives_as_each_was_to_have(
    http: httpx.AsyncClient, of_prompt: int, of_answer: int
) -> None:
    fields = {"prompt": ids("the dog"), "echo": True, "prompt_logprobs": of_prompt, "logprobs": of_answer}
    (choice,) = (await completed(http, **fields, max_tokens=2))["choices"]
    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} == {max(1, of_prompt)}
    assert {len(entry) for entry in choice["logprobs"]["top_logprobs"][1:]} == {of_answer}


@pytest.mark.api("completions", "return_tokens_as_token_ids")
@pytest.mark.api("chat.completions", "return_tokens_as_token_ids")
async def test_tokens_as_ids(http: httpx.AsyncClient) -> None:
    expected = [f"token_id:{token}" for token in ids(ANSWER)[:4]]
    body = await completed(http, logprobs=1, max_tokens=4, return_tokens_as_token_ids=True)
    assert body["choices"][0]["logprobs"]["tokens"] == expected
    body = await chatted(http, logprobs=True, max_tokens=4, return_tokens_as_token_ids=True)
    assert [entry["token"] for entry in body["choices"][0]["logprobs"]["content"]] == expected


@pytest.mark.api("completions", "best_of", "n")
async def test_best_of_returns_the_likeliest(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    def script(submit: Submit) -> list[int]:
        # The stand-in's log-probabilities are all the same: the shorter the better needs other tokens.
        return ids(f"answer {submit.sampling.seed}")

    cell.script = script
    scores = {70: -3.0, 71: -1.0, 72: -2.0}
    cell.score = lambda submit: scores[submit.sampling.seed]
    body = await completed(http, best_of=3, n=2, seed=70)
    assert [choice["text"] for choice in body["choices"]] == ["answer 71", "answer 72"]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 3 * len(ids("answer 70"))
    for fields in ({"best_of": 1, "n": 2}, {"best_of": 3, "stream": True}, {"best_of": 9}):
        response = await http.post(COMPLETIONS, json={"prompt": "a", **fields})
        assert response.json()["error"]["param"] == "best_of", fields


@pytest.mark.api("completions", "truncate_prompt_tokens")
@pytest.mark.api("chat.completions", "truncate_prompt_tokens")
async def test_prompts_are_cut_at_their_beginning(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    prompt = ids("the quick brown fox jumps over the lazy dog") * 40
    body = await completed(http, prompt=prompt, truncate_prompt_tokens=5, echo=True, max_tokens=2)
    assert cell.submissions[0].prompt == prompt[-5:]
    assert body["choices"][0]["text"].startswith(codec().decode(prompt[-5:]))
    await completed(http, prompt=prompt, truncate_prompt_tokens=-1, max_tokens=9)
    assert cell.submissions[1].prompt == prompt[-(cell.max_tokens - 9) :]
    await chatted(http, truncate_prompt_tokens=3)
    assert len(cell.submissions[2].prompt) == 3
    response = await http.post(COMPLETIONS, json={"prompt": "a", "truncate_prompt_tokens": 0})
    assert response.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.api("completions", "truncation_side")
@pytest.mark.api("chat.completions", "truncation_side")
async def test_what_the_tokenizer_adds_stays_when_a_text_is_cut(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    """As of vLLM: a model that expects a token in front of every text is not left without."""
    text = "the quick brown fox jumps over the lazy dog"
    bos, *whole = codec().encode(text)
    assert whole == ids(text)
    for fields, expected in (
        ({}, [bos, *whole[-2:]]),
        ({"truncation_side": "left"}, [bos, *whole[-2:]]),
        ({"truncation_side": "right"}, [bos, *whole[:2]]),
        ({"add_special_tokens": False}, whole[-3:]),
        ({"prompt": [bos, *whole], "truncation_side": "left"}, whole[-3:]),
        ({"prompt": [bos, *whole], "truncation_side": "right"}, [bos, *whole[:2]]),
        ({"truncate_prompt_tokens": 1}, whole[-1:]),
        ({"truncate_prompt_tokens": len(whole) + 1}, [bos, *whole]),
        ({"truncate_prompt_tokens": None, "truncation_side": "right"}, [bos, *whole]),
    ):
        await completed(http, **({"prompt": text, "truncate_prompt_tokens": 3} | fields))
        assert cell.submissions[-1].prompt == expected, fields
    await chatted(http)
    await chatted(http, truncate_prompt_tokens=3, truncation_side="right")
    assert cell.submissions[-1].prompt == cell.submissions[-2].prompt[:3]


@pytest.mark.parametrize("window", [8, 256, 1024])
@pytest.mark.api("completions", "truncate_prompt_tokens", "max_tokens")
@pytest.mark.api("chat.completions", "truncate_prompt_tokens", "min_tokens")
async def test_a_prompt_cut_to_fit_leaves_room_for_an_answer(
    http: httpx.AsyncClient, cell: CellStandIn, window: int
) -> None:
    cell.max_tokens = window
    prompt = [40] * 2 * window
    messages = [{"role": "user", "content": "word " * window}]
    await completed(http, prompt=prompt, max_tokens=None, truncate_prompt_tokens=-1)
    await chatted(http, messages=messages, truncate_prompt_tokens=-1)
    await chatted(http, messages=messages, truncate_prompt_tokens=-1, min_tokens=window // 2)
    expected = [min(16, window // 4), min(4096, window // 4), max(window // 2, min(4096, window // 4))]
    assert [submission.sampling.max_tokens for submission in cell.submissions] == expected
    assert [len(submission.prompt) for submission in cell.submissions] == [window - room for room in expected]
    # A prompt that fits is not cut, and its answer may go on to the end of the window.
    await completed(http, prompt=prompt[: window - 2], max_tokens=2, truncate_prompt_tokens=-1)
    assert len(cell.submissions[-1].prompt) == window - 2


def test_no_more_room_is_left_in_a_large_window_than_an_answer_takes_by_default() -> None:
    info = CellInfo(model="demo", max_tokens=40_000, vocab_size=512)
    chat = ChatRequest.model_validate({"messages": MESSAGES})
    assert reserved_tokens(chat, info) == ASSUMED_MAX_TOKENS
    assert reserved_tokens(chat, replace(info, default_max_tokens=300)) == 300
    assert reserved_tokens(CompletionRequest(prompt=["a"]), info) == COMPLETION_MAX_TOKENS


def text_of(submit: Submit) -> str:
    return codec().decode(submit.prompt, skip_special_tokens=False)


@pytest.mark.api(
    "chat.completions",
    "continue_final_message",
    "add_generation_prompt",
    "chat_template_kwargs",
    "add_special_tokens",
)
async def test_how_the_template_is_used(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Well,"}]
    await chatted(http, messages=messages, continue_final_message=True)
    assert text_of(cell.submissions[-1]).endswith("<|assistant|>Well,")
    await chatted(http, messages=messages, add_generation_prompt=False)
    assert text_of(cell.submissions[-1]).endswith("Well,<|end|>")
    await chatted(http, chat_template_kwargs={"bos_token": "(begin)"})
    assert text_of(cell.submissions[-1]) == "(begin)<|user|>hello<|end|><|assistant|>"
    await chatted(http, add_special_tokens=True)
    assert text_of(cell.submissions[-1]).startswith("<|bos|><|bos|>")
    for fields, param in (
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ):
        response = await http.post(CHAT, json={"messages": MESSAGES, **fields})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param


@pytest.mark.api("completions", "add_special_tokens")
async def test_the_tokenizers_own_tokens_are_optional(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    await completed(http, add_special_tokens=False)
    await completed(http)
    assert text_of(cell.submissions[0]) == "hello"
    assert text_of(cell.submissions[1]) == "<|bos|>hello"


@pytest.mark.api(
    "completions", "user", "metadata", "safety_identifier", "session_id", "prompt_cache_key", "store"
)
@pytest.mark.api(
    "chat.completions", "user", "metadata", "safety_identifier", "session_id", "prompt_cache_key", "store"
)
async def test_fields_that_are_not_used_change_nothing(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    fields: dict[str, Any] = {
        "user": "u",
        "metadata": {"a": "b"},
        "safety_identifier": "s",
        "session_id": "i",
        "prompt_cache_key": "k",
    }
    fields["store"] = True
    await completed(http, seed=1, **fields)
    await completed(http, seed=1)
    await chatted(http, seed=1, **fields)
    await chatted(http, seed=1)
    for with_fields, without in (cell.submissions[:2], cell.submissions[2:]):
        assert with_fields.sampling == without.sampling
        assert with_fields.prompt == without.prompt


@pytest.mark.parametrize("name", sorted(NEUTRAL_VALUES))
@pytest.mark.api("completions", "*refused")
@pytest.mark.api("chat.completions", "*refused")
async def test_fields_without_use_are_neutral_or_refused(http: httpx.AsyncClient, name: str) -> None:
    for path, schema in ((COMPLETIONS, CompletionRequest), (CHAT, ChatRequest)):
        if name in schema.model_fields:
            continue
        base: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "a"}
        for value in NEUTRAL_VALUES[name]:
            response = await http.post(path, json={**base, name: value})
            assert response.status_code == 200, response.text
        response = await http.post(path, json={**base, name: {"asks": "something"}})
        error = response.json()["error"]
        assert response.status_code == 400
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        called = CALLED_HERE.get(name)
        told = f"send `{called}`" if called in schema.model_fields else "leave it out"
        assert error["message"].endswith(f"; {told}.")


CALLED_HERE = {
    "grammar": "guided_grammar", "no_stop_trim": "include_stop_str_in_output", "functions": "tools",
    "function_call": "tool_choice",
}  # fmt: skip


@pytest.mark.api("chat.completions", "top_logprobs", "logprobs")
async def test_no_alternatives_need_no_log_probabilities(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    """vLLM's clients send its defaults; `echo` and `include_reasoning` are among the neutral fields."""
    body = await chatted(http, top_logprobs=0, logprobs=False, echo=False, include_reasoning=True)
    assert body["choices"][0]["logprobs"] is None
    body = await chatted(http, top_logprobs=0, logprobs=True)
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert [one.sampling.logprobs for one in cell.submissions] == [None, 0]


VLLM_BENCH = {
    "model": "demo", "prompt": "hello", "repetition_penalty": 1.0, "temperature": 0.0, "max_tokens": 8,
    "logprobs": None, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
}  # fmt: skip
GUIDELLM = {
    "model": "demo", "prompt": "hello", "max_tokens": 8, "stop": None, "ignore_eos": True, "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}  # fmt: skip
PARTS = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]


@pytest.mark.parametrize("bench", [VLLM_BENCH, GUIDELLM])
@pytest.mark.api("completions", "stop", "ignore_eos", "stream_options", "repetition_penalty")
@pytest.mark.api("chat.completions", "stop", "ignore_eos", "stream_options", "max_completion_tokens")
async def test_what_load_generators_send(http: httpx.AsyncClient, bench: dict[str, Any]) -> None:
    """`vllm bench serve` 0.32 and guidellm 0.8 send these, and read the usage of the last event."""
    chat = {k: v for k, v in bench.items() if k not in ("prompt", "max_tokens", "logprobs")}
    chat |= {"messages": PARTS, "max_completion_tokens": 8}
    for path, body in ((COMPLETIONS, bench), (CHAT, chat)):
        response = await http.post(path, json=body)
        assert response.status_code == 200, response.text
        *_, last, done = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        assert done == "[DONE]"
        assert json.loads(last)["usage"]["completion_tokens"] == 8
