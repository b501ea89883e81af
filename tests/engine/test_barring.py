"""Allowed tokens and bad words against a plain account of what they mean, row by row of a tree."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.barring import allow_only_
from engine.sampling import Row, TokenHistory, decide, processed_logits
from engine.sampling_params import SamplingParams
from tests.examples import examples

VOCAB = 7
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)
WORDS = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple), max_size=4).map(
    tuple
)


def is_ruled_out(
    token: int, allowed: tuple[int, ...], words: tuple[tuple[int, ...], ...], text: list[int]
) -> bool:
    if allowed and token not in allowed:
        return True
    longer = [*text, token]
    return any(longer[-len(word) :] == list(word) for word in words)


@examples(150)
@given(TOKENS, TOKENS, TOKENS, st.lists(st.integers(0, VOCAB - 1), max_size=4, unique=True).map(tuple), WORDS)
def test_ruled_out_tokens_are_impossible_and_no_others(
    prompt: list[int],
    output: list[int],
    path: list[int],
    allowed: tuple[int, ...],
    words: tuple[tuple[int, ...], ...],
) -> None:
    params = SamplingParams(temperature=0.0, allowed_token_ids=allowed, bad_words=words)
    history = TokenHistory(prompt, output[:2])
    history.extend(output[2:])
    logits = torch.arange(VOCAB, dtype=torch.float32).repeat(2, 1)
    row = Row(params, len(output) + len(path), history, path)
    got = processed_logits(logits, [Row(SamplingParams(temperature=0.0), 0), row])
    assert got[0].tolist() == logits[0].tolist()
    expected = [
        -math.inf if is_ruled_out(token, allowed, words, output + path) else float(token)
        for token in range(VOCAB)
    ]
    assert got[1].tolist() == expected
    if any(value > -math.inf for value in expected):
        assert decide(logits, [row, row]).tokens.tolist() == [expected.index(max(expected))] * 2


def test_what_is_kept_of_a_request_s_ids_is_never_another_s() -> None:
    """Ids are looked up by the object that holds them, and there may be another at its place in memory."""
    for number in range(500):
        allowed, size = (number % VOCAB, 100), VOCAB if number % 2 else 2 * VOCAB
        logits = torch.zeros(2, size)
        for _ in range(2):
            allow_only_(logits, 1, allowed)
        assert logits[1].isfinite().nonzero().flatten().tolist() == [number % VOCAB]
        assert logits[0].isfinite().all()
