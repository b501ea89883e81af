"""Grammars over tokenizers that have more tokens than the model: what it does not have may not come next."""

from __future__ import annotations

import copy
from functools import partial

import pytest

from engine.constraint import Constraint
from engine.grammar import GrammarError, Grammars, make_tokenizer
from engine.mask_bits import holds
from engine.thoughtful_grammar import matcher_of
from tests.fakes.tiny_tokenizer import ids, tokenizer

MODEL = len(tokenizer())


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    larger = copy.deepcopy(tokenizer())
    larger.add_tokens(["<extra>", "<more>"], special_tokens=True)
    text, ends = larger.backend_tokenizer.to_str(), [larger.eos_token_id]
    return Grammars(partial(make_tokenizer, text, ends, MODEL), vocab_size=MODEL)


def test_a_token_that_the_model_does_not_have_is_never_allowed(grammars: Grammars) -> None:
    assert grammars.tokenizer.vocab_size > MODEL
    [a] = ids("a")
    mask = matcher_of(grammars, Constraint(kind="grammar", text='start: "a" | <extra>')).allowed()
    assert holds(mask, a)
    assert not any(holds(mask, token) for token in range(MODEL, 32 * len(mask)))
    matcher = matcher_of(grammars, Constraint(kind="grammar", text='start: "a" <extra> "b"'), [a])
    with pytest.raises(GrammarError, match="no token of the vocabulary"):
        matcher.allowed()


def test_a_grammar_of_such_tokens_alone_is_refused(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match="nothing can satisfy"):
        grammars.check(Constraint(kind="grammar", text="start: <extra> <more>"))


@pytest.mark.parametrize("other", [-1, MODEL + 1000])
def test_an_end_that_the_model_does_not_have_is_passed_over(other: int) -> None:
    text, end = tokenizer().backend_tokenizer.to_str(), tokenizer().eos_token_id
    load = partial(make_tokenizer, text, sorted([other, end]), MODEL)
    [a] = ids("a")
    mask = matcher_of(Grammars(load, vocab_size=MODEL), Constraint(kind="regex", text="a"), [a]).allowed()
    assert [token for token in range(MODEL) if holds(mask, token)] == [end]
