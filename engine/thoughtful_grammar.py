"""Grammars of answers that a thought may come before, of which the grammar says nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto

import msgspec
import numpy as np

from engine.constraint import Constraint, Thought
from engine.grammar import Grammars
from engine.mask_bits import TokenMask, without
from engine.matcher import Matcher


def matcher_of(grammars: Grammars, constraint: Constraint, output: Sequence[int] = ()) -> Matcher:
    """Follows one answer, of which `output` has been generated."""
    if constraint.thought is None:
        return Matcher(grammars, constraint, output)
    return ThoughtfulMatcher(grammars, constraint, constraint.thought, output)


class _Where(Enum):
    """Which part of the output the next token belongs to."""

    START = auto()
    THOUGHT = auto()
    ANSWER = auto()


class ThoughtfulMatcher(Matcher):
    """As `Matcher`, where the grammar begins behind a thought.

    Args:
        grammars: compiles.
        constraint: of the answer.
        thought: what may come before it.
        output: generated so far.
    """

    def __init__(
        self, grammars: Grammars, constraint: Constraint, thought: Thought, output: Sequence[int] = ()
    ) -> None:
        super().__init__(grammars, msgspec.structs.replace(constraint, thought=None))
        self._thought = thought
        self._where = _Where.THOUGHT if thought.is_open else _Where.START
        # Per token of the path: where it leads, and how many tokens of the path are the answer's by then.
        self._trail: list[tuple[_Where, int]] = []
        self.advance(output)

    def advance(self, tokens: Iterable[int]) -> None:
        """See `Matcher`."""
        said = []
        for token in tokens:
            self._where, is_said = self._after(self._where, token)
            if is_said:
                said.append(token)
        super().advance(said)

    def allowed(self) -> TokenMask:
        """See `Matcher`; within the thought, all tokens but those that end the answer."""
        where, _ = self._trail[-1] if self._trail else (self._where, 0)
        if where is _Where.THOUGHT:
            self._read()  # says which end it
            return without(self._grammars.any_token(), self.end_tokens)
        mask = super().allowed()
        if where is _Where.START:
            word, bit = divmod(self._thought.open_token, 32)
            mask.view(np.uint32)[word] |= np.uint32(1 << bit)
        return mask

    def enter(self, token: int, depth: int) -> None:
        """See `Matcher`."""
        del self._trail[depth - 1 :]
        where, num_said = self._trail[-1] if self._trail else (self._where, 0)
        after, is_said = self._after(where, token)
        if is_said:
            super().enter(token, num_said + 1)
        elif not num_said:
            super().leave()
        self._trail.append((after, num_said + is_said))

    def leave(self) -> None:
        """See `Matcher`."""
        self._trail.clear()
        super().leave()

    def recover(self) -> None:
        """See `Matcher`."""
        self._trail.clear()
        super().recover()

    def _after(self, where: _Where, token: int) -> tuple[_Where, bool]:
        """Where a token leads, and whether it is of the answer."""
        if where is _Where.START and token == self._thought.open_token:
            return _Where.THOUGHT, False
        if where is _Where.THOUGHT:
            return (_Where.ANSWER if token == self._thought.close_token else where), False
        return _Where.ANSWER, True
