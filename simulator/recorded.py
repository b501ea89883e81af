"""Acceptance as it was recorded: a request gets what drafters said along an answer that a model gave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from benchmarks.acceptance_table import AcceptanceTable
from simulator.acceptance import Choices
from simulator.noise import bits, key_of

Int64 = NDArray[np.int64]

# A request takes one of so many answers of its class, those that are next to it in length: ease goes with it.
NEAREST = 8
_ANSWER, _ASTRAY = 201, 202
_LEAST_LOGP = float(np.log(1e-9))


class RecordedAcceptance:
    """Draws, for every request, one answer of its class; all drafters then say what they said along that one.

    Positions, neighbouring ones, drafters among each other, and the length of an answer with its ease are
    related as they were. After a wrong token a drafter says what it said at some position of that answer.
    """

    def __init__(self, table: AcceptanceTable) -> None:
        """From a log.

        Raises:
            ValueError: if a class has no answers that all drafters read.
        """
        self.width = table.width
        self._logp, self._rank = table.logp, table.rank.astype(np.int64)
        self._drafters = {name: index for index, name in enumerate(table.drafters)}
        # (drafter, answer) -> its first row and how many there are.
        self._rows: dict[tuple[int, int], tuple[int, int]] = {}
        lengths: dict[str, dict[int, list[int]]] = {}
        for domain in sorted(set(table.domains)):
            of_answers = lengths[domain] = defaultdict(list)
            for index in range(len(table.drafters)):
                for part in table.answers(index, domain):
                    answer = int(table.answer[part[0]])
                    self._rows[index, answer] = (int(part[0]), len(part))
                    of_answers[answer].append(len(part))
        if not lengths:
            raise ValueError("the log of drafters' choices is empty")
        self._by_length = {
            domain: sorted(
                (held[-1], answer) for answer, held in of.items() if len(held) == len(table.drafters)
            )
            for domain, of in lengths.items()
        }
        for domain, found in self._by_length.items():
            if not found:
                raise ValueError(f"the log has no answer of class {domain!r} that all drafters read")

    def check(self, drafters: Iterable[str], kinds: Iterable[str], width: int) -> None:
        """See that drafters, classes and so wide a beam are in the log.

        Raises:
            ValueError: if one is not.
        """
        missing = {*drafters} - self._drafters.keys() | {*kinds} - self._by_length.keys()
        if missing or width > self.width:
            raise ValueError(
                f"the log has {', '.join(self._drafters)} on {', '.join(self._by_length)} with "
                f"{self.width} choices, not {', '.join(sorted(missing)) or f'{width} choices'}"
            )

    def choices(
        self, drafter: str, kind: str, seed: int, *, num_positions: int, num_astray: int, width: int
    ) -> Choices:
        """What a drafter says along a request's text and off it; arguments as of `simulator.acceptance`.

        Raises:
            ValueError: for a drafter or a class that the log does not have, or a wider beam.
        """
        self.check((drafter,), (kind,), width)
        first, count = self._rows[self._drafters[drafter], self._answer(kind, seed, num_positions)]
        # Row 0 of a request is before its first token, which no drafter guesses; a recorded answer has none.
        along = np.arange(num_positions) - 1
        half = max(1, count // 2)
        over = along >= count
        along[over] = count - half + (along[over] - count) % half
        along = np.maximum(along, 0)
        astray = (bits(key_of(seed, _ASTRAY), 0, num_astray) % np.uint64(count)).astype(np.int64)
        rows = first + np.concatenate([along, astray])
        logp = np.maximum(self._logp[rows, :width].astype(np.float64), _LEAST_LOGP)
        rank = np.minimum(self._rank[rows], width)
        rank[num_positions:] = width
        return Choices(logp, np.exp(logp), rank)

    def _answer(self, kind: str, seed: int, num_positions: int) -> int:
        held = self._by_length[kind]
        place = int(np.searchsorted([length for length, _ in held], num_positions - 1))
        low = max(0, min(place - NEAREST // 2, len(held) - NEAREST))
        near = held[low : low + NEAREST]
        return near[int(bits(key_of(seed, _ANSWER), 0, 1)[0] % np.uint64(len(near)))][1]
