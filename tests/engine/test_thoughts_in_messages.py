"""Where a thought ends that is messages, each with a header: along trees as token by token."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from engine.constraint import Constraint, Thought
from engine.mask_bits import TokenMask, holds
from engine.matcher import Matcher
from engine.thoughtful_grammar import ThoughtfulMatcher
from tests.examples import examples
from tests.masked_reference import answer_in
from tests.verifier.grammars import END, make_grammars, tokenizer

OPEN, CLOSE, FIRST, SECOND, OTHER = 5, 7, 14, 15, 20
ANSWERS = ["ab", "xyz"]
GRAMMARS = make_grammars()
VOCAB = tokenizer().vocab_size
FORM = Constraint(kind="choice", text=json.dumps(ANSWERS))


def allowed(mask: TokenMask) -> set[int]:
    return {token for token in range(VOCAB) if holds(mask, token)}


@examples(300)
@given(
    st.builds(
        Thought,
        open_token=st.just(OPEN),
        close_token=st.just(CLOSE),
        is_open=st.booleans(),
        header=st.sampled_from([(), (FIRST,), (FIRST, SECOND), (FIRST, CLOSE), (FIRST, FIRST)]),
        ends=st.sampled_from([(), (END,)]),
    ),
    st.lists(st.sampled_from([OPEN, CLOSE, FIRST, FIRST, SECOND, OTHER]), max_size=12),
    st.lists(st.integers(0, VOCAB - 1), max_size=4),
    st.integers(0, 12),
)
def test_paths_lead_where_tokens_do(
    thought: Thought, told: list[int], last: list[int], num_read: int
) -> None:
    committed, path = (told + last)[:num_read], (told + last)[num_read:]
    form = Constraint(kind=FORM.kind, text=FORM.text, thought=thought)
    matcher = ThoughtfulMatcher(GRAMMARS, form, thought)
    read: list[int] = []
    for depth, token in enumerate([*committed, *path], 1 - len(committed)):
        may_come = allowed(matcher.allowed())
        answer = answer_in(form, read)
        if answer is None:
            assert may_come == set(range(VOCAB)) - ({END} - set(thought.ends))
        else:
            begins = set() if read or thought.is_open else {OPEN}
            assert may_come == allowed(Matcher(GRAMMARS, FORM, answer).allowed()) | begins
        if token not in may_come or token == END:
            break
        if depth <= 0:
            matcher.advance([token])
        else:
            matcher.enter(token, depth)
        read.append(token)
    matcher.leave()
    again = ThoughtfulMatcher(GRAMMARS, form, thought, read[: len(committed)])
    assert allowed(matcher.allowed()) == allowed(again.allowed())
