"""Text that reads like a special token, in answers that have to contain it."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from engine.constraint import Constraint, ConstraintKind
from engine.grammar import GrammarError, Grammars, make_tokenizer
from engine.mask_bits import tokens_in
from engine.matcher import Matcher
from engine.thoughtful_grammar import matcher_of
from tests.fakes.tiny_tokenizer import ids, tokenizer

SIZE = len(tokenizer())
END = int(tokenizer().eos_token_id)
SPELLED: list[tuple[ConstraintKind, str, set[str]]] = [
    ("choice", json.dumps(["<|end|>", "<|user|> says"]), {"<|end|>", "<|user|> says"}),
    ("choice", json.dumps(["a<|user|>b"]), {"a<|user|>b"}),
    ("json_schema", json.dumps({"const": "<|end|>"}), {'"<|end|>"'}),
    (
        "json_schema",
        json.dumps(
            {
                "type": "object",
                "properties": {"<|end|>": {"enum": ["<|pad|>", 1]}},
                "required": ["<|end|>"],
                "additionalProperties": False,
            }
        ),
        {'{"<|end|>": "<|pad|>"}', '{"<|end|>": 1}', '{"<|end|>":"<|pad|>"}', '{"<|end|>":1}'},
    ),
    ("regex", r"x<\|end\|>(y|<\|end\|>)", {"x<|end|>y", "x<|end|><|end|>"}),
    ("grammar", 'start: "a<|user|>b"', {"a<|user|>b"}),
    ("grammar", 'root ::= "a<|user|>b" | "c"', {"a<|user|>b", "c"}),
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    text = tokenizer().backend_tokenizer.to_str()
    return Grammars(lambda: make_tokenizer(text, [END], SIZE), vocab_size=SIZE)


@pytest.mark.parametrize(("kind", "text", "answers"), SPELLED)
def test_it_is_spelled_by_ordinary_tokens(
    grammars: Grammars, kind: ConstraintKind, text: str, answers: set[str]
) -> None:
    """However its tokens are chosen the answer is whole, and what may come next depends on the text alone."""
    constraint = Constraint(kind=kind, text=text)
    grammars.check(constraint)
    found = set()
    for seed in range(12):
        rng, output = random.Random(seed), list[int]()
        matcher = matcher_of(grammars, constraint)
        while not output or output[-1] != END:
            mask = matcher.allowed()
            np.testing.assert_array_equal(mask, matcher_of(grammars, constraint, output).allowed())
            token = rng.choice(tokens_in(mask))
            assert token == END or not grammars.tokenizer.is_special_token(token)
            output.append(token)
            matcher.advance([token])
        found.add(tokenizer().decode(output[:-1]))
    assert found <= answers
    assert found & {answer for answer in answers if "<|" in answer}


def test_paths_that_are_left_change_nothing(grammars: Grammars) -> None:
    """As along the nodes of a tree: into the text, back out of it, and into another one."""
    constraint = Constraint(kind="choice", text=json.dumps(["a<|user|>b", "a<|end|>c", "d"]))
    matcher = matcher_of(grammars, constraint)

    def along(*tokens: int) -> list[int]:
        return tokens_in(Matcher(grammars, constraint, tokens).allowed())

    paths = [ids("a<"), ids("d"), [*ids("a<|"), *ids("user|>")], ids("a<|"), ids("a")]
    for path in paths:
        for depth, token in enumerate(path, 1):
            matcher.enter(token, depth)
            assert tokens_in(matcher.allowed()) == along(*path[:depth])
        matcher.leave()
        assert tokens_in(matcher.allowed()) == along()


def test_a_token_that_a_grammar_names_is_that_token(grammars: Grammars) -> None:
    constraint = Constraint(kind="grammar", text='start: <|user|> "b"')
    (user,) = tokens_in(matcher_of(grammars, constraint).allowed())
    assert tokenizer().convert_ids_to_tokens(user) == "<|user|>"


def test_an_expression_that_is_too_large_is_found_when_it_is_compiled(grammars: Grammars) -> None:
    grammars.check(Constraint(kind="regex", text="(a{50}){50}"))
    with pytest.raises(GrammarError, match="too many"):
        grammars.check(Constraint(kind="regex", text="a{1000000}"))
