"""A text between two vocabularies: committed tokens for a drafter to read, and back what it drafts.

String-level exact matching (SLEM) of N. Timor et al., "Accelerating LLM inference with lossless speculative
decoding algorithms for heterogeneous vocabularies" (2025, arXiv 2502.05202, algorithm 2), as in Transformers'
`UniversalSpeculativeDecodingGenerator`: the two models exchange text, and each reads it in its own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import NamedTuple

from drafters.retokenize_vocabulary import Vocabulary

# Tokens spelled anew with every addition, and how many of them must come out as before.
_OVERLAP = 16
_SAME = 6
# Bytes, and so tokens at most.
_LONGEST_CHARACTER = 4
# Log-probability that a token at the end of a draft is the target's, the text being right: two of three are,
# from the demo family's smaller vocabulary to its larger one.
_UNSETTLED = log(0.65)


@dataclass(frozen=True, slots=True)
class Pair:
    """The vocabularies of a target and of a drafter, and their special tokens that correspond."""

    target: Vocabulary
    drafter: Vocabulary
    to_drafter: Mapping[int, int]
    to_target: Mapping[int, int]

    @classmethod
    def of(cls, target: Vocabulary, drafter: Vocabulary) -> Pair:
        """Match the special tokens of both."""
        return cls(target, drafter, target.counterparts(drafter), drafter.counterparts(target))


class RetokenizedText:
    """A sequence of the target's tokens as a growing sequence of the drafter's.

    Text between special tokens is cut as the drafter's tokenizer cuts it, so that an addition may change the
    last of its tokens; only these are looked at again. A special token becomes its counterpart, or is spelled
    out if it has none.

    Attributes:
        ids: the drafter's tokens. They stand for exactly the bytes of the target's.
    """

    __slots__ = ("_ends", "_first", "_pair", "_reported", "_text", "ids")

    def __init__(self, pair: Pair) -> None:
        """Of no tokens."""
        self._pair = pair
        self.ids: list[int] = []
        self._reported = 0  # of `ids`, those that are as they were last reported
        self._begin()

    def _begin(self) -> None:
        """What follows is text of its own."""
        self._first = len(self.ids)  # of `ids` that spell `_text`
        self._text = bytearray()
        self._ends: list[int] = []  # where each of those ends in it

    def report(self) -> tuple[int, list[int]]:
        """The first position at which `ids` differs from those last reported, and `ids` from there on."""
        start, self._reported = self._reported, len(self.ids)
        return start, self.ids[start:]

    def start_over(self, tokens: Sequence[int]) -> bool:
        """Hold other tokens of the target instead; returns as `append`."""
        before, reported = self.ids, self._reported
        self.ids = []
        self._begin()
        possible = self.append(tokens)
        self._reported = min(reported, _common(before, self.ids))
        return possible

    def append(self, tokens: Sequence[int]) -> bool:
        """Add tokens of the target; False if the drafter cannot spell them, after which this is of no use."""
        pair = self._pair
        for token in tokens:
            piece = pair.target.piece(token)
            if piece is None:
                counterpart = pair.to_drafter.get(token)
                if counterpart is not None:
                    if not self._spell():
                        return False
                    if not self.ids and pair.drafter.begin not in ((), (counterpart,)):
                        self.ids += pair.drafter.begin
                    self.ids.append(counterpart)
                    self._begin()
                    continue
                piece = (pair.target.special_name(token) or "").encode()
            self._text += piece
        return self._spell()

    def _spell(self) -> bool:
        """Bring `ids` up to the text."""
        if len(self._text) == (self._ends[-1] if self._ends else 0):
            return True
        if not self.ids and self._pair.drafter.begin:
            self.ids += self._pair.drafter.begin
            self._first = len(self.ids)
        overlap = _OVERLAP
        while True:
            kept = self._cut(max(0, len(self._ends) - overlap))
            begin = self._ends[kept - 1] if kept else 0
            spelled = self._pair.drafter.spell(bytes(self._text[begin:]))
            if spelled is None:
                return False
            old = self.ids[self._first + kept :]
            if not kept or spelled[:_SAME] == old[:_SAME]:
                break
            overlap *= 4  # cut at an unlucky place
        self._reported = min(self._reported, self._first + kept + _common(old, spelled))
        del self.ids[self._first + kept :], self._ends[kept:]
        self.ids += spelled
        for token in spelled:
            begin += len(self._pair.drafter.piece(token) or b"")
            self._ends.append(begin)
        return True

    def _cut(self, kept: int) -> int:
        """`kept` tokens, or a few less: the rest of the last character would be spelled another way alone."""
        for fewer in range(kept, max(0, kept - _LONGEST_CHARACTER), -1):
            if not _is_within_character(self._text[self._ends[fewer - 1]]):
                return fewer
        return kept if kept > _LONGEST_CHARACTER else 0


class Drafted(NamedTuple):
    """A path in the target's tokens.

    Attributes:
        tokens: the target's tokens.
        logps: for each, the log-probability of the shortest part of the path that spells it.
        num_settled: how many of them came out the same without the path's last token.
    """

    tokens: list[int]
    logps: list[float]
    num_settled: int


def drafted_tokens(pair: Pair, tokens: Sequence[int], logps: Sequence[float]) -> Drafted:
    """What a path of the drafter's tokens drafts in the target's.

    The last of the target's tokens might have come out longer had more been drafted. So after the settled
    ones only one more is kept, at a lower log-probability. Before a special token all are settled.

    Args:
        pair: the vocabularies.
        tokens: the path.
        logps: log-probabilities from the root to each of them.
    """
    ends: list[int] = []
    text, before = b"", b""
    special, is_complete = -1, False
    for token in tokens:
        piece = pair.drafter.piece(token)
        if piece is None:
            special, is_complete = pair.to_target.get(token, -1), True
            break
        before, text = text, text + piece
        ends.append(len(text))
    spelled = pair.target.spell(text)
    if spelled is None:
        return Drafted([], [], 0)
    settled = len(spelled) if is_complete else _common(spelled, pair.target.spell(before) or [])
    drafted: list[int] = []
    values: list[float] = []
    end = last = 0
    for token in spelled[: settled + 1]:
        end += len(pair.target.piece(token) or b"")
        while ends[last] < end:
            last += 1
        values.append(logps[last] + (_UNSETTLED if len(drafted) == settled else 0.0))
        drafted.append(token)
    if special >= 0:
        drafted.append(special)
        values.append(logps[len(ends)])
        settled += 1
    return Drafted(drafted, values, settled)


def _is_within_character(byte: int) -> bool:
    """Whether it goes on a character of UTF-8 that was begun before it."""
    return byte & 0xC0 == 0x80


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
