"""Where the n-grams of a growing token sequence occurred before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

_MOST_OCCURRENCES = 32  # looked at per length: more of the same rarely bring a new continuation


class NgramIndex:
    """Earlier occurrences of a sequence's own suffixes. Appending and looking up cost O(max_ngram)."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        """An empty sequence whose n-grams of min_ngram <= n <= max_ngram are indexed."""
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._after: dict[int, dict[tuple[int, ...], list[int]]] = {n: {} for n in self._lengths}
        self.tokens: list[int] = []

    def append(self, token: int) -> None:
        """Add a token. Only now do the n-grams before it have a continuation, and so an entry."""
        tokens, position = self.tokens, len(self.tokens)
        for n in self._lengths:
            if n <= position:
                self._after[n].setdefault(tuple(tokens[position - n :]), []).append(position)
        tokens.append(token)

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        tokens = self.tokens
        for position in range(len(tokens) - 1, length - 1, -1):
            for n in self._lengths:
                if n <= position:
                    gram = tuple(tokens[position - n : position])
                    after = self._after[n][gram]
                    after.pop()
                    if not after:
                        del self._after[n][gram]
        del tokens[length:]

    def matches(self) -> Iterator[tuple[int, int]]:
        """(n, position) of the tokens that once followed the present suffix of n tokens.

        Longest suffix first, most recent occurrence first, no position twice.
        """
        seen: set[int] = set()
        for n in self._lengths:
            if n > len(self.tokens):
                continue
            after = self._after[n].get(tuple(self.tokens[-n:]), ())
            for position in islice(reversed(after), _MOST_OCCURRENCES):
                if position not in seen:
                    seen.add(position)
                    yield n, position
