"""A generalised suffix automaton over token sequences, built online, with occurrence counts.

The automaton of A. Blumer et al. (1985), "The smallest automaton recognizing the subwords of a text", for
several sequences. Speculative decoding drafts from one in SAM-Decoding (Hu et al. 2024, arXiv 2411.10666),
and from suffix trees with frequencies in SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975).

A state stands for a set of strings that end at the same places: the suffixes of its longest one down to a
least length, below which its *link* takes over. At most two states and three transitions come with a token.

How often a string occurs is the number of its places. Counting a new place means adding one to every state on
the path of links from the whole text, which in a repetition is as long as the text. But contexts longer than
`max_match` tokens are never asked for, so the path is entered where strings are that long: a pointer to that
suffix moves along with the text, and the work per token is bounded by `max_match` whatever the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

ROOT = 0
_NONE = -1


class Context(NamedTuple):
    """A string that occurs: its state, and its length in tokens."""

    state: int
    length: int


EMPTY = Context(ROOT, 0)


class SuffixAutomaton:
    """Substrings of all sequences added, and what followed them how often.

    Attributes:
        max_match: longest context that is looked up, in tokens.
        num_tokens: tokens added, over all sequences.
    """

    __slots__ = ("_count", "_last", "_length", "_link", "_next", "_tail", "max_match", "num_tokens")

    def __init__(self, max_match: int) -> None:
        """An automaton of no sequence.

        Raises:
            ValueError: unless `max_match` is positive.
        """
        if max_match < 1:
            raise ValueError(f"max_match must be positive, not {max_match}")
        self.max_match = max_match
        self.num_tokens = 0
        self._next: list[dict[int, int]] = [{}]
        self._link = [_NONE]
        self._length = [0]
        self._count = [0]
        self._last = ROOT  # the whole of the present sequence
        self._tail = EMPTY  # its last max_match + 1 tokens: the longest string whose count is kept

    @property
    def num_states(self) -> int:
        """States, the root included."""
        return len(self._next)

    def start_sequence(self) -> None:
        """What is appended from here on belongs to another sequence; no string spans two."""
        self._last = ROOT
        self._tail = EMPTY

    def append(self, token: int) -> None:
        """Add a token to the present sequence. Amortised O(1), and O(max_match) for the counts."""
        last, transitions, length, link = self._last, self._next, self._length, self._link
        known = transitions[last].get(token)
        if known is not None:
            new = known if length[known] == length[last] + 1 else self._clone(last, token, known)
        else:
            new = self._state(length[last] + 1, {}, 0)
            at = last
            while at != _NONE and token not in transitions[at]:
                transitions[at][token] = new
                at = link[at]
            if at == _NONE:
                link[new] = ROOT
            else:
                known = transitions[at][token]
                link[new] = known if length[known] == length[at] + 1 else self._clone(at, token, known)
        self._last = new
        self.num_tokens += 1
        before = self._settle(self._tail)
        self._tail = self._settle(
            Context(transitions[before.state][token], min(before.length + 1, self.max_match + 1))
        )
        count, at = self._count, self._tail.state
        while at != ROOT:
            count[at] += 1
            at = link[at]

    def step(self, context: Context, token: int) -> Context:
        """The longest suffix of `context` and then `token` that occurs, of at most `max_match` tokens."""
        state, length = context
        transitions = self._next
        while token not in transitions[state]:
            if state == ROOT:
                return EMPTY
            state = self._link[state]
            length = self._length[state]
        return self._settle(Context(transitions[state][token], min(length + 1, self.max_match)))

    def match(self, tokens: Sequence[int]) -> Context:
        """The longest suffix of `tokens` that occurs, of at most `max_match` tokens."""
        context = EMPTY
        for token in tokens[-self.max_match :]:
            context = self.step(context, token)
        return context

    def tail(self) -> Context:
        """The last `max_match` tokens of the present sequence, or all if they are fewer."""
        return self._settle(Context(self._tail.state, min(self._tail.length, self.max_match)))

    def contexts(self, context: Context) -> Iterator[Context]:
        """`context` and its suffixes that something followed, longest first, without the empty one.

        Suffixes that occur at the same places come as the longest of them.
        """
        state, length = self._settle(context)
        while state != ROOT:
            if self._next[state]:
                yield Context(state, length)
            state = self._link[state]
            length = self._length[state]

    def followers(self, context: Context) -> Iterator[tuple[int, int]]:
        """Tokens that followed the context, and how often each did."""
        count = self._count
        for token, state in self._next[context.state].items():
            yield token, count[state]

    def count(self, context: Context) -> int:
        """How often the context occurs; it is not empty."""
        return self._count[self._settle(context).state]

    def _settle(self, context: Context) -> Context:
        """The same string with its present state: a clone may have taken it over, or it was shortened."""
        state, length = context
        while state != ROOT and self._length[self._link[state]] >= length:
            state = self._link[state]
        return Context(state, length)

    def _state(self, length: int, transitions: dict[int, int], count: int) -> int:
        self._next.append(transitions)
        self._link.append(_NONE)
        self._length.append(length)
        self._count.append(count)
        return len(self._length) - 1

    def _clone(self, at: int, token: int, state: int) -> int:
        """Split the strings of `state` that are `token` after those of `at` and shorter ones off."""
        transitions, link = self._next, self._link
        clone = self._state(self._length[at] + 1, transitions[state].copy(), self._count[state])
        link[clone] = link[state]
        link[state] = clone
        while at != _NONE and transitions[at].get(token) == state:
            transitions[at][token] = clone
            at = link[at]
        return clone
