"""Recent outputs of all requests in suffix automata, in bounded memory.

A suffix automaton cannot forget: a state may stand for strings of many sequences. So outputs go into the
younger of two automata, each for half the capacity; when it is full it becomes the older one, and the older
one is dropped whole. Once full, between half the capacity and all of it is remembered, always the newest, and
each token is added once. Reference counts per sequence would forget more evenly, at the price of a second set
of counts on every state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from drafters.suffix_automaton import SuffixAutomaton


class RecentOutputs:
    """The newest outputs, as two generations of suffix automata.

    Finished outputs wait in a queue and are taken in piece by piece, so that no draft call has to wait for a
    long one.
    """

    def __init__(self, capacity: int, max_match: int) -> None:
        """Remember at most `capacity` tokens; `max_match` as for the automata.

        Raises:
            ValueError: unless `capacity` is at least 2.
        """
        if capacity < 2:
            raise ValueError(f"a store of recent outputs needs room for 2 tokens, not {capacity}")
        self._half = capacity // 2
        self._young = SuffixAutomaton(max_match)
        self._old = SuffixAutomaton(max_match)
        self._waiting: deque[list[int]] = deque()
        self._taken = 0  # tokens of the first in the queue
        self._num_waiting = 0

    @property
    def automata(self) -> tuple[SuffixAutomaton, SuffixAutomaton]:
        """The younger generation and the older one; other objects after an eviction."""
        return self._young, self._old

    @property
    def num_tokens(self) -> int:
        """Tokens remembered."""
        return self._young.num_tokens + self._old.num_tokens

    @property
    def num_waiting(self) -> int:
        """Tokens in the queue."""
        return self._num_waiting

    def add(self, output: Sequence[int]) -> None:
        """Queue an output. Of what would not fit the queue (half the capacity) the oldest is dropped."""
        kept = list(output[-self._half :])
        if not kept:
            return
        self._waiting.append(kept)
        self._num_waiting += len(kept)
        while self._num_waiting > self._half:
            self._num_waiting -= len(self._waiting.popleft()) - self._taken
            self._taken = 0

    def take_in(self, most: int) -> None:
        """Move up to `most` tokens from the queue into the younger automaton."""
        for _ in range(min(most, self._num_waiting)):
            if self._young.num_tokens >= self._half:
                self._old, self._young = self._young, SuffixAutomaton(self._young.max_match)
            output = self._waiting[0]
            if self._taken == 0:
                self._young.start_sequence()
            self._young.append(output[self._taken])
            self._taken += 1
            self._num_waiting -= 1
            if self._taken == len(output):
                self._waiting.popleft()
                self._taken = 0
