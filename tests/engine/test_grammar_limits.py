"""Answers whose grammar takes more work than a step has, for which all requests of a target would wait."""

from __future__ import annotations

import pytest

from engine.constraint import Constraint
from engine.grammar import Grammars, TooMuchWork, make_tokenizer
from engine.mask_bits import tokens_in
from engine.matcher import Matcher
from tests.fakes.tiny_tokenizer import tokenizer


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    core = tokenizer()
    text, ends = core.backend_tokenizer.to_str(), [int(core.eos_token_id)]
    return Grammars(lambda: make_tokenizer(text, ends, len(core)))


def begun(grammars: Grammars, constraint: Constraint) -> Matcher:
    """An answer with its first token, behind which all is forced."""
    matcher = Matcher(grammars, constraint)
    matcher.advance(tokens_in(matcher.allowed())[:1])
    return matcher


def test_what_is_too_much_is_said(grammars: Grammars) -> None:
    """And not that a token which was allowed does not fit."""
    constraint = Constraint(kind="grammar", text='start: ("a"|"b") ("the dog "){50000}')
    matcher = begun(grammars, constraint)
    matcher.advance(tokens_in(matcher.allowed())[:1])
    with pytest.raises(TooMuchWork, match="Too many items"):
        matcher.allowed()


def test_no_step_looks_ahead_by_hundreds_of_thousands(grammars: Grammars) -> None:
    """What is forced is spelled by the tokenizer in every step anew, which takes a second per million."""
    state = grammars.prepare(Constraint(kind="regex", text="(a|b)x{400000}")).result().deep_copy()
    assert state.consume_token(tokens_in(grammars.mask(state))[0])
    assert 10_000 < len(state.compute_ff_bytes()) < 100_000


def test_a_text_as_long_as_it_may_be_is_followed(grammars: Grammars) -> None:
    matcher = begun(grammars, Constraint(kind="regex", text=f"(a|b){'the dog ' * 8000}"))
    for _ in range(5):
        matcher.advance(tokens_in(matcher.allowed())[:1])
