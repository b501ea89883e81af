"""The suffix automaton and the store of recent outputs against brute force over the sequences."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.suffix_automaton import EMPTY, SuffixAutomaton
from drafters.suffix_store import RecentOutputs
from tests.examples import examples

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=1, max_size=4)


def occurrences(sequences: list[list[int]], text: list[int]) -> int:
    n = len(text)
    return sum(s[i : i + n] == text for s in sequences for i in range(len(s) - n + 1))


def built(sequences: list[list[int]], max_match: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton(max_match)
    for sequence in sequences:
        automaton.start_sequence()
        for token in sequence:
            automaton.append(token)
    return automaton


@examples(300)
@given(sequences=SEQUENCES, max_match=st.integers(1, 8))
def test_counts_are_right_after_every_token(sequences: list[list[int]], max_match: int) -> None:
    automaton = SuffixAutomaton(max_match)
    seen: list[list[int]] = []
    for sequence in sequences:
        automaton.start_sequence()
        seen.append([])
        for token in sequence:
            automaton.append(token)
            seen[-1].append(token)
            tail = automaton.tail()
            assert tail.length == min(len(seen[-1]), max_match)
            assert automaton.count(tail) == occurrences(seen, seen[-1][-tail.length :])
    assert automaton.num_tokens == sum(map(len, sequences))
    assert automaton.num_states <= 2 * automaton.num_tokens + 1


@examples(300)
@given(sequences=SEQUENCES, text=st.lists(st.integers(0, 3), max_size=12), max_match=st.integers(1, 8))
def test_the_longest_suffix_and_its_followers_are_found(
    sequences: list[list[int]], text: list[int], max_match: int
) -> None:
    automaton = built(sequences, max_match)
    match = automaton.match(text)
    lengths = [n for n in range(1, min(len(text), max_match) + 1) if occurrences(sequences, text[-n:])]
    assert match.length == max(lengths, default=0)
    followers = {
        n: {t: count for t in range(4) if (count := occurrences(sequences, [*text[-n:], t]))} for n in lengths
    }
    reported = {c.length: dict(automaton.followers(c)) for c in automaton.contexts(match)}
    assert all(reported[n] == followers[n] for n in reported)
    # Suffixes left out occur at the same places as the next longer one reported.
    wanted = {n for n in lengths if followers[n]}
    assert all(followers[n] == followers[min(m for m in reported if m >= n)] for n in wanted)
    assert set(reported) <= wanted


def test_stepping_is_matching() -> None:
    automaton = built([[1, 2, 3, 1, 2, 4], [2, 3, 3]], 3)
    text, context = [1, 2, 3, 3, 9, 1, 2, 4, 4], EMPTY
    for n, token in enumerate(text, 1):
        context = automaton.step(context, token)
        assert context.length == automaton.match(text[:n]).length


def test_a_long_repetition_costs_no_more_per_token_than_max_match() -> None:
    automaton = built([[7] * 5000], 8)
    assert automaton.count(automaton.match([7] * 20)) == 5000 - 7
    with pytest.raises(ValueError, match="max_match"):
        SuffixAutomaton(0)


@examples(100)
@given(
    outputs=st.lists(st.lists(st.integers(0, 9), max_size=30), max_size=12),
    capacity=st.integers(2, 60),
    pieces=st.integers(1, 9),
)
def test_recent_outputs_are_bounded_and_the_newest(
    outputs: list[list[int]], capacity: int, pieces: int
) -> None:
    store = RecentOutputs(capacity, 4)
    added: list[list[int]] = []
    for output in outputs:
        store.add(output)
        added.append(output[-(capacity // 2) :])
        while store.num_waiting:
            before = store.num_waiting
            store.take_in(pieces)
            assert store.num_waiting == max(0, before - pieces)
            assert store.num_tokens <= capacity
    everything = [token for output in added for token in output]
    assert store.num_tokens >= min(len(everything), capacity // 2)
    newest = next((output for output in reversed(added) if output), [])
    for token in newest[-1:]:
        assert any(automaton.match([token]).length for automaton in store.automata)


def test_the_queue_of_outputs_is_bounded_too() -> None:
    store = RecentOutputs(20, 4)
    for number in range(9):
        store.add([number] * 4)
    assert store.num_waiting <= 10
    store.take_in(100)
    assert [store.automata[0].match([number]).length for number in (0, 8)] == [0, 1]
    with pytest.raises(ValueError, match="room"):
        RecentOutputs(1, 4)
