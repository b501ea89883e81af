"""`text_offset` of completions: an index into the text that is shown."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.text_offsets import TextOffsets, echo_offsets
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import ANSWER, codec, ids

COMPLETIONS = "/v1/completions"


def pieces(text: str, offsets: list[int]) -> list[str]:
    return [text[a:b] for a, b in itertools.pairwise([*offsets, len(text)])]


@given(st.text(max_size=30))
def test_tokens_are_found_by_their_offsets(text: str) -> None:
    tokens = ids(text)
    shown = pieces(text, TextOffsets(codec().detokenizer()).of(tokens))
    assert "".join(shown) == text
    for token, piece in zip(tokens, shown, strict=True):
        name = codec().token_text(token)
        assert piece == name or name.startswith("bytes:")
    assert echo_offsets(codec(), tokens, text) == TextOffsets(codec().detokenizer()).of(tokens)


def test_special_tokens_have_the_place_they_are_shown_at() -> None:
    text = "<|user|>hi<|end|>"
    prompt = codec().encode(text)
    assert [codec().special_text(token) for token in (prompt[0], prompt[2])] == ["<|bos|>", None]
    assert echo_offsets(codec(), prompt, text)[:3] == [0, 0, 8]
    assert echo_offsets(codec(), prompt, "hi")[:3] == [0, 0, 0]
    assert echo_offsets(codec(), prompt, text)[-1] == 10


async def logprobs(http: httpx.AsyncClient, stream: bool, **fields: Any) -> tuple[str, dict[str, list[Any]]]:
    """Text and log-probabilities of one choice, put together from chunks."""
    body = {"prompt": "hi", "max_tokens": 100, "logprobs": 0, "stream": stream, **fields}
    response = await http.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines] if stream else response.json()["choices"]
    names = ("tokens", "token_logprobs", "text_offset")
    joined = {name: [one for choice in choices for one in choice["logprobs"][name]] for name in names}
    return "".join(choice["text"] for choice in choices), joined


@pytest.mark.parametrize("per_step", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"echo": True},
        {"echo": True, "prompt": "naïve <|user|>café 日本"},
        {"echo": True, "prompt": [1, *ids("naïve 日本"), 2]},
        {"return_tokens_as_token_ids": True},
        {"stop": " answers"},
        {"ignore_eos": True, "skip_special_tokens": False},
    ],
)
@pytest.mark.api("completions", "logprobs", "echo")
async def test_offsets_index_into_the_text(
    http: httpx.AsyncClient, cell: CellStandIn, fields: dict[str, Any], stream: bool, per_step: int
) -> None:
    cell.per_step = per_step
    text, told = await logprobs(http, stream, **fields)
    tokens = cell.submissions[0].prompt if "echo" in fields else []
    tokens = [*tokens, *ids(ANSWER), *codec().eos_ids][: len(told["tokens"])]
    shown = pieces(text, told["text_offset"])
    assert text.endswith("".join(shown))
    for token, piece in zip(tokens, shown, strict=True):
        name = codec().token_text(token)
        if not name.startswith("bytes:") and codec().special_text(token) is None and "stop" not in fields:
            assert piece == name
    if not stream:
        assert max(told["text_offset"]) <= len(text)
    if "echo" in fields:
        assert told["text_offset"][0] == 0
        assert len(text) - len(ANSWER) in told["text_offset"]
    if fields == {"stop": " answers"}:
        assert "".join(shown) == text == ANSWER.partition(" answers")[0]
