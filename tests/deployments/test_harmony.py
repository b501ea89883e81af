"""Answers in channels: thoughts told apart from what is said, however the text is cut."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from deployments.api_service import ApiService
from deployments.harmony import HarmonyParser
from deployments.openai_api import create_app
from deployments.reasoning import kind_for_template
from tests.deployments.socket_server import served
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import codec, ids

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
USUAL = f"{ANALYSIS}2 + 2, easy.{NEXT}{FINAL}It is 4."


def parts(*texts: str, is_told: bool = True) -> tuple[str, str]:
    """What is thought and what is said."""
    parser = HarmonyParser(is_told=is_told)
    told = [*(parser.feed(text) for text in texts), parser.finish()]
    return "".join(thought for thought, _ in told), "".join(said for _, said in told)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (USUAL, ("2 + 2, easy.", "It is 4.")),
        (f"{USUAL}<|return|>", ("2 + 2, easy.", "It is 4.")),
        (f"{FINAL}It is 4.", ("", "It is 4.")),
        (f"{ANALYSIS}cut o", ("cut o", "")),
        (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", ("a\n\nb", "c")),
        (f"{ANALYSIS}a{NEXT}<|channel|>commentary<|message|>First,{NEXT}{FINAL}c", ("a", "First,\n\nc")),
        (f"{FINAL}said{NEXT}{ANALYSIS}late{NEXT}{FINAL}more", ("", "said\n\nmore")),
        (f"{ANALYSIS}a<|end|>\n<|start|>assistant{FINAL}c", ("a", "c")),
        (f"{ANALYSIS}a{FINAL}c", ("a", "c")),  # some models forget the end
        ("<|start|>assistant<|channel|>analysis <|constrain|>text<|message|>a", ("a", "")),
        ("Yes, without channels.", ("", "Yes, without channels.")),
        (f"{ANALYSIS}a < b and <| c", ("a < b and <| c", "")),
        (f"{ANALYSIS}a{NEXT}<|channel|>fin", ("a", "")),
        ("<|chan", ("", "<|chan")),
        ("", ("", "")),
    ],
)
def test_what_is_thought_and_what_is_said(text: str, told: tuple[str, str]) -> None:
    assert parts(text) == told
    assert parts(*text) == told
    assert parts(*text, is_told=False) == ("", told[1])


@given(
    st.lists(
        st.sampled_from(
            [ANALYSIS, FINAL, NEXT, "<|end|>", "<|return|>", "<|", "<|message|>", " ", "\n", "a", "b"]
        ),
        max_size=9,
    ),
    st.data(),
)
def test_the_cut_makes_no_difference(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = data.draw(st.sets(st.integers(0, len(text))))
    cut = [text[begin:end] for begin, end in pairwise(sorted({0, len(text), *cuts}))]
    assert parts(*cut) == parts(text)


def test_tokens_of_thoughts_are_counted_with_their_headers() -> None:
    for size in (1, 4, 1000):
        parser, tokens = HarmonyParser(), list(range(len(USUAL)))  # a token for each character
        for begin in range(0, len(USUAL), size):
            parser.feed(USUAL[begin : begin + size], tokens[begin : begin + size])
        thought = len(ANALYSIS) + len("2 + 2, easy.")
        if size < 1000:
            assert abs(parser.num_tokens - thought) <= len("<|end|>") + size
        assert parser.num_tokens <= len(USUAL)


def test_a_broken_header_does_not_swallow_the_answer() -> None:
    thought, said = parts("<|channel|>" + "word " * 200)
    assert thought == ""
    assert said.count("word") == 200


def test_the_template_shows_it() -> None:
    shown = '{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}'
    assert kind_for_template(shown) == "harmony"


@pytest.fixture
async def client(cell: CellStandIn) -> AsyncIterator[AsyncOpenAI]:
    cell.max_tokens = 2048
    service = ApiService(cell, codec(), tool_parser="none", reasoning_parser="harmony")
    async with (
        served(create_app(service)) as address,
        AsyncOpenAI(base_url=f"{address}/v1", api_key="unused") as made,
    ):
        yield made


async def test_chats(client: AsyncOpenAI, cell: CellStandIn) -> None:
    cell.per_step = 3
    # `<|end|>` ends the tiny model's answers, and some of gpt-oss do without it.
    cell.script = lambda submit: [*ids(USUAL.replace("<|end|>", "")), *codec().eos_ids]
    hello: Any = {"role": "user", "content": "2 + 2?"}
    whole = await client.chat.completions.create(model="demo", messages=[hello])
    message: Any = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("2 + 2, easy.", "It is 4.")
    thought = said = ""
    async for chunk in await client.chat.completions.create(model="demo", messages=[hello], stream=True):
        delta: Any = chunk.choices[0].delta
        thought += getattr(delta, "reasoning_content", None) or ""
        said += delta.content or ""
    assert (thought, said) == ("2 + 2, easy.", "It is 4.")
