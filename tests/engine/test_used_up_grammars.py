"""What answers and drafts have explored of a grammar before, whosever they were, is nothing to an answer."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from engine.constraint import Constraint
from engine.grammar import GrammarError, Grammars, make_tokenizer
from engine.mask_bits import holds, tokens_in
from engine.matcher import Matcher
from engine.thoughtful_grammar import matcher_of
from engine.tree import TokenTree
from tests.fakes.tiny_tokenizer import tokenizer
from verifier.constrained import Bounds, mask_tree

SIZE = len(tokenizer())
END = int(tokenizer().eos_token_id)
#: So few that one answer is followed with them, and a few are not.
MAX_STATES = 500
#: Of the first, every choice of where a `z` stands is another state; in the second text is spelled anew.
CONSTRAINTS = [
    Constraint(kind="regex", text="(.*z.{20})*x"),
    Constraint(kind="regex", text=r"[yz]{3}\[<\|user\|>\](.*z.{20})*x"),
    Constraint(kind="json_schema", text=json.dumps({"type": "string", "pattern": "a.{12}|b.{13}"})),
]


def grammars(max_states: int | None) -> Grammars:
    text = tokenizer().backend_tokenizer.to_str()
    return Grammars(lambda: make_tokenizer(text, [END], SIZE), vocab_size=SIZE, max_states=max_states)


def likely(mask: np.ndarray, rng: random.Random) -> int:
    """A token that is allowed, one of a single letter if there is one."""
    letters = tokenizer().convert_tokens_to_ids([*"zyabq[]"])
    return rng.choice([token for token in letters if holds(mask, token)] or tokens_in(mask))


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_every_answer_is_followed_as_the_first_one(constraint: Constraint) -> None:
    few, many, rng = grammars(MAX_STATES), grammars(None), random.Random(5)
    first = few.prepare(constraint)
    for _ in range(12):
        output: list[int] = []
        matcher, plain = matcher_of(few, constraint), matcher_of(many, constraint)
        while len(output) < 45 and END not in output:
            mask = matcher.allowed()
            np.testing.assert_array_equal(mask, plain.allowed())
            output.append(likely(mask, rng))
            matcher.advance(output[-1:])
            plain.advance(output[-1:])
    assert few.prepare(constraint) is not first  # else nothing was used up


@pytest.mark.parametrize("constraint", CONSTRAINTS[:2])
def test_drafts_use_nothing_up_for_the_answer(constraint: Constraint) -> None:
    few, many, rng = grammars(MAX_STATES), grammars(None), random.Random(6)
    matcher, plain, output = matcher_of(few, constraint), matcher_of(many, constraint), [0]
    for position in range(30):
        chains = [[likely(plain.allowed(), rng)] for _ in range(6)]
        for chain in chains:
            while len(chain) < 8:
                chain.append(likely(Matcher(many, constraint, [*output[1:], *chain]).allowed(), rng))
        token = [output[-1], *(one for chain in chains for one in chain)]
        parent = [-1, *(0 if i % 8 == 0 else i for i in range(48))]
        depth = [0, *(i % 8 + 1 for i in range(48))]
        tree = TokenTree.of(token, parent, [-0.1] * 49, depth)
        bounds = Bounds(position=position, min_tokens=0, stop=(END,), max_depth=99, max_forced=8)
        found, expected = mask_tree(matcher, tree, bounds), mask_tree(plain, tree, bounds)
        np.testing.assert_array_equal(found.tree.token, expected.tree.token)
        np.testing.assert_array_equal(found.masks, expected.masks)
        output.append(likely(expected.masks[0], rng))
        matcher.advance(output[-1:])
        plain.advance(output[-1:])


def test_an_answer_that_uses_a_grammar_up_by_itself_is_an_error() -> None:
    constraint, few = Constraint(kind="regex", text="[yz]{600}x"), grammars(MAX_STATES)
    few.check(constraint)
    (token,) = tokenizer().convert_tokens_to_ids(["y"])
    with pytest.raises(GrammarError, match="too many states"):
        matcher_of(few, constraint, [token] * 590).allowed()
