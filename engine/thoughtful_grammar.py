"""Grammars of answers that a thought may come before, of which the grammar says nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple

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


class _Part(Enum):
    """Which part of the output the next token belongs to."""

    START = auto()
    THOUGHT = auto()
    ANSWER = auto()


class _Where(NamedTuple):
    """The part, and in a thought how much of the header has followed the last mark of its beginning."""

    part: _Part
    num_header: int = 0  # `_OTHER` behind what is no such header


_OTHER = -1
_ANSWER = _Where(_Part.ANSWER)


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
        self._where = _Where(_Part.THOUGHT if thought.is_open else _Part.START)
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
        if where.part is _Part.THOUGHT:
            self._read()  # says which end it
            return without(self._grammars.any_token(), self.end_tokens.difference(self._thought.ends))
        mask = super().allowed()
        if where.part is _Part.START:
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
        thought = self._thought
        if where.part is _Part.ANSWER or (where.part is _Part.START and token != thought.open_token):
            return _ANSWER, True
        if token == thought.open_token:
            return _Where(_Part.THOUGHT), False
        header, num = thought.header, where.num_header
        if num == len(header):
            return (_ANSWER if token == thought.close_token else where), False
        follows = num != _OTHER and token == header[num]
        return _Where(_Part.THOUGHT, num + 1 if follows else _OTHER), False
