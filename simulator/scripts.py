"""Requests' texts and what drafters say along them, laid out so that a whole batch is looked up at once."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from simulator.acceptance import AcceptanceModel, Choices, DraftQuality, choices, text
from simulator.noise import bits, key_of
from simulator.recorded import RecordedAcceptance

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

# Contexts with a wrong token in them that a request has per drafter; paths off the text wander among them.
NUM_ASTRAY = 64
# Pieces of the arena are multiples of this many rows, so that freed ones fit others.
PIECE = 64
_WANDER = 5


class Rows:
    """Places in an arena: pieces of rows handed out and taken back."""

    def __init__(self) -> None:
        self.capacity = 0
        self._end = 0
        self._free: dict[int, list[int]] = defaultdict(list)

    def take(self, count: int) -> int:
        """Index of the first of at least `count` rows; `capacity` may have grown."""
        size = -(-count // PIECE) * PIECE
        if self._free[size]:
            return self._free[size].pop()
        start, self._end = self._end, self._end + size
        if self._end > self.capacity:
            self.capacity = max(2 * self.capacity, self._end, 1 << 12)
        return start

    def give(self, start: int, count: int) -> None:
        """Take rows back."""
        self._free[-(-count // PIECE) * PIECE].append(start)


@dataclass(slots=True)
class Script:
    """One request as the simulated models know it.

    Attributes:
        kind: its class.
        seed: what its text and the drafters' choices are made from.
        prompt_len, num_output: tokens.
        base: where its text begins in the arena of texts.
        rows: by drafter, where its contexts begin in that drafter's arena.
    """

    kind: str
    seed: int
    prompt_len: int
    num_output: int
    base: int
    rows: dict[str, int] = field(default_factory=dict)


class DrafterTable:
    """A drafter's choices in every context of the requests it knows.

    Attributes:
        name: of the drafter.
        index: tells its noise from that of others.
        width: choices per context.
        logp: float64 [rows, width], descending.
        token: int32 [rows, width].
        next: int64 [rows, width], row of the context after that token.
        agreed: int32 [rows], first choices that are the target's among the request's contexts before this.
    """

    def __init__(self, name: str, index: int, quality: DraftQuality, width: int) -> None:
        self.name, self.index, self.quality, self.width = name, index, quality, width
        self._rows = Rows()
        self.logp: Float64 = np.zeros((0, width))
        self.token: Int32 = np.zeros((0, width), dtype=np.int32)
        self.next: Int64 = np.zeros((0, width), dtype=np.int64)
        self.agreed: Int32 = np.zeros(0, dtype=np.int32)

    def fill(
        self, script: Script, model: AcceptanceModel | RecordedAcceptance, vocab_size: int, truth: Int64
    ) -> int:
        """Write a request's contexts; the row of the first.

        Args:
            script: the request.
            model: how requests differ, or a log of what drafters said.
            vocab_size: even.
            truth: int64 [num_output], its text.
        """
        num, width = script.num_output, self.width
        total = num + NUM_ASTRAY
        said = self._said(script, model)
        start = self._rows.take(total)
        self._grow()
        rows = slice(start, start + total)
        self.logp[rows] = said.logp
        draws = bits(key_of(script.seed, _WANDER, self.index), 0, total)
        # Wrong tokens are odd, and differ between siblings.
        wrong = (draws % np.uint64(vocab_size // 2)).astype(np.int64)[:, None] + np.arange(width)
        token = 2 * (wrong % (vocab_size // 2)) + 1
        astray = (draws >> np.uint64(40)).astype(np.int64)[:, None] + 7 * np.arange(width)
        after = start + num + astray % NUM_ASTRAY
        right = np.flatnonzero(said.rank < width)
        token[right, said.rank[right]] = truth[right]
        after[right, said.rank[right]] = start + right + 1
        self.token[rows] = token
        self.next[rows] = after
        self.agreed[start] = 0
        np.cumsum(said.rank[:num] == 0, out=self.agreed[start + 1 : start + 1 + num])
        return start

    def _said(self, script: Script, model: AcceptanceModel | RecordedAcceptance) -> Choices:
        num, width = script.num_output, self.width
        if isinstance(model, RecordedAcceptance):
            return model.choices(
                self.name, script.kind, script.seed, num_positions=num, num_astray=NUM_ASTRAY, width=width
            )
        return choices(
            model,
            self.quality,
            script.kind,
            script.seed,
            self.index,
            num_positions=num,
            num_astray=NUM_ASTRAY,
            width=width,
        )

    def free(self, script: Script) -> None:
        """Take a request's rows back."""
        start = script.rows.pop(self.name, None)
        if start is not None:
            self._rows.give(start, script.num_output + NUM_ASTRAY)

    def _grow(self) -> None:
        missing = self._rows.capacity - len(self.agreed)
        if missing <= 0:
            return
        width = self.width
        self.logp = np.concatenate([self.logp, np.zeros((missing, width))])
        self.token = np.concatenate([self.token, np.zeros((missing, width), dtype=np.int32)])
        self.next = np.concatenate([self.next, np.zeros((missing, width), dtype=np.int64)])
        self.agreed = np.concatenate([self.agreed, np.zeros(missing, dtype=np.int32)])


class Scripts:
    """All requests of a run that have not ended.

    Attributes:
        text: int32 [rows], the target's tokens of all of them.
        vocab_size: of target and drafters; even.
    """

    def __init__(self, model: AcceptanceModel | RecordedAcceptance, vocab_size: int = 32000) -> None:
        self.model, self.vocab_size = model, vocab_size
        self.text: Int32 = np.zeros(0, dtype=np.int32)
        self._rows = Rows()
        self._held: dict[str, Script] = {}
        self._tables: dict[str, DrafterTable] = {}

    def __getitem__(self, request_id: str) -> Script:
        return self._held[request_id]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def table(self, name: str, quality: DraftQuality, width: int, stream: int | None = None) -> DrafterTable:
        """A new drafter's table; `stream` tells its noise from that of others, its number if None."""
        index = len(self._tables) if stream is None else stream
        table = self._tables[name] = DrafterTable(name, index, quality, width)
        return table

    @property
    def end_token(self) -> int:
        """The token after those of all texts: an answer that ends before its bound ends with it."""
        return self.vocab_size

    def add(
        self,
        request_id: str,
        kind: str,
        seed: int,
        prompt_len: int,
        num_output: int,
        *,
        ends_early: bool = False,
    ) -> Script:
        """A request that may be served from now on; arguments as of `Script` and `SimRequest`."""
        base = self._rows.take(num_output)
        missing = self._rows.capacity - len(self.text)
        if missing > 0:
            self.text = np.concatenate([self.text, np.zeros(missing, dtype=np.int32)])
        self.text[base : base + num_output] = text(seed, num_output, self.vocab_size)
        if ends_early:
            self.text[base + num_output - 1] = self.end_token
        script = self._held[request_id] = Script(kind, seed, prompt_len, num_output, base)
        return script

    def row(self, script: Script, table: DrafterTable) -> int:
        """Where a request's contexts begin in a drafter's table, written now if they were not."""
        start = script.rows.get(table.name)
        if start is None:
            truth = self.text[script.base : script.base + script.num_output].astype(np.int64)
            start = script.rows[table.name] = table.fill(script, self.model, self.vocab_size, truth)
        return start

    def remove(self, request_id: str) -> None:
        """A request has ended."""
        script = self._held.pop(request_id, None)
        if script is None:
            return
        self._rows.give(script.base, script.num_output)
        for table in self._tables.values():
            table.free(script)
