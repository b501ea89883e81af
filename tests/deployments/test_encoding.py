"""Prompts are the tokens that Transformers gives, without what else it makes of them."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from deployments.text_codec import TextCodec
from tests.fakes.tiny_tokenizer import tokenizer


@given(
    text=st.lists(st.one_of(st.text(), st.sampled_from(["<|end|>", " <|user|> ", "\n\n", "日本🙂"]))).map(
        "".join
    ),
    special=st.booleans(),
)
def test_tokens_are_those_of_transformers(text: str, special: bool) -> None:
    codec = TextCodec(tokenizer())
    assert codec.encode(text, add_special_tokens=special) == tokenizer().encode(
        text, add_special_tokens=special
    )


def test_what_a_file_says_of_truncation_and_padding_does_not_count() -> None:
    own = copy.deepcopy(tokenizer())
    own.backend_tokenizer.enable_truncation(3)
    own.backend_tokenizer.enable_padding(length=200)
    assert TextCodec(own).encode("def add(a, b): return a + b") == tokenizer().encode(
        "def add(a, b): return a + b"
    )


@pytest.mark.parametrize("special", [False, True])
def test_a_tokenizer_that_does_more_is_asked_itself(special: bool) -> None:
    class Shouting(PreTrainedTokenizerFast):
        def encode(self, text: str, **options: object) -> list[int]:
            found: list[int] = super().encode(text.upper(), **options)
            return found

    own = Shouting(tokenizer_object=tokenizer().backend_tokenizer)
    assert TextCodec(own).encode("abc", add_special_tokens=special) == tokenizer().encode(
        "ABC", add_special_tokens=special
    )
