"""Index of token prefixes whose keys and values are in the pool, so that requests can share them."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from engine.slots import SlotPool

Int32 = NDArray[np.int32]

BLOCK_TOKENS = 16
"""Prefixes are shared in blocks of this many tokens."""


@dataclass(slots=True, eq=False)
class _Block:
    key: tuple[int, bytes]
    number: int
    parent: _Block | None
    slots: Int32
    last_used: int
    children: int = field(default=0)


class PrefixCache:
    """A tree of token blocks; each node holds the slots of one block, and one reference on each slot.

    A node's key is its parent's number and the block's tokens themselves. That chains like a hash of
    the whole prefix, but compares real tokens, so two prefixes can never be confused. Prefixes in different
    namespaces share nothing: the key of a first block begins with its namespace.
    """

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._blocks: dict[tuple[int, bytes], _Block] = {}
        self._clock = count(1)
        self._numbers = count(1)
        # (last_used, number, block) of leaves, oldest first; entries out of date are skipped when met.
        self._leaves: list[tuple[int, int, _Block]] = []

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def held(self) -> NDArray[np.bool_]:
        """bool [num_slots], slots the index holds a reference on. A live view: read only."""
        return self._pool.kept

    @property
    def evictable_slots(self) -> int:
        """Slots that would become free if everything were evicted: those nobody else holds."""
        return self._pool.num_unused

    def num_matched(self, tokens: Int32, namespace: bytes = b"") -> int:
        """How many tokens `match` would find slots of; nothing counts as used."""
        return BLOCK_TOKENS * len(self._walk(tokens, namespace))

    def match(self, tokens: Int32, namespace: bytes = b"") -> Int32:
        """Slots, int32 [matched], of the longest prefix of `tokens` in the namespace, in whole blocks.

        Takes no references: the caller retains what it keeps before anything can be evicted.
        """
        path = self._walk(tokens, namespace)
        self._touch(path)
        if not path:
            return np.empty(0, dtype=np.int32)
        return np.concatenate([block.slots for block in path])

    def insert(self, tokens: Int32, slots: Int32, namespace: bytes = b"") -> Int32:
        """Index the full blocks of `tokens`, whose KV is in `slots` (equally long; the caller holds them).

        Returns the slots, int32 [indexed blocks * BLOCK_TOKENS], the index holds for these tokens. Where they
        differ from the caller's, an earlier request had computed the same block: use those instead. It ends
        before a block of which another one has some slots.
        """
        num_blocks = min(len(tokens), len(slots)) // BLOCK_TOKENS
        tokens = np.ascontiguousarray(tokens[: num_blocks * BLOCK_TOKENS], dtype=np.int32)
        path = self._walk(tokens, namespace)
        parent = path[-1] if path else None
        for index in range(len(path), num_blocks):
            span = slice(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS)
            if self._pool.kept[slots[span]].any():
                break  # cut back into a block that is here, and continued otherwise: it cannot be in two
            block = _Block(
                key=_key(parent, tokens[span].tobytes(), namespace),
                number=next(self._numbers),
                parent=parent,
                slots=np.array(slots[span], dtype=np.int32),
                last_used=0,
            )
            self._pool.keep(block.slots)
            self._blocks[block.key] = block
            if parent is not None:
                parent.children += 1
            path.append(block)
            parent = block
        self._touch(path)
        if not path:
            return np.empty(0, dtype=np.int32)
        return np.concatenate([block.slots for block in path])

    def evict(self, wanted: int) -> int:
        """Free at least `wanted` slots if that is possible, least recently used leaves first.

        Returns how many became free. Blocks whose every slot is held by a request are left alone:
        evicting them would free nothing.
        """
        freed = 0
        in_use: list[tuple[int, int, _Block]] = []
        while freed < wanted and self._leaves:
            entry = heapq.heappop(self._leaves)
            last_used, _, block = entry
            if block.children or block.last_used != last_used or self._blocks.get(block.key) is not block:
                continue
            if self._pool.references[block.slots].min() > 1:
                in_use.append(entry)
                continue
            freed += self._remove(block)
        for entry in in_use:
            heapq.heappush(self._leaves, entry)
        return freed

    def check_invariants(self) -> None:
        """Raise AssertionError unless the tree, its slots and the leaf queue agree."""
        held = np.zeros_like(self.held)
        children: dict[int, int] = {}
        queued = {(number, last_used) for last_used, number, _ in self._leaves}
        for key, block in self._blocks.items():
            if block.key != key or held[block.slots].any():
                raise AssertionError("a slot is held by two blocks, or a block has the wrong key")
            held[block.slots] = True
            if block.parent is not None:
                if self._blocks.get(block.parent.key) is not block.parent:
                    raise AssertionError("a block outlived its parent")
                children[block.parent.number] = children.get(block.parent.number, 0) + 1
        if not np.array_equal(held, self.held) or (self._pool.references[held] < 1).any():
            raise AssertionError("held slots and blocks disagree")
        for block in self._blocks.values():
            if block.children != children.get(block.number, 0):
                raise AssertionError("wrong number of children")
            if not block.children and (block.number, block.last_used) not in queued:
                raise AssertionError("a leaf can never be evicted")

    def _walk(self, tokens: Int32, namespace: bytes) -> list[_Block]:
        data = np.ascontiguousarray(tokens, dtype=np.int32).tobytes()
        step = BLOCK_TOKENS * 4
        path: list[_Block] = []
        block: _Block | None = None
        for start in range(0, len(data) - step + 1, step):
            block = self._blocks.get(_key(block, data[start : start + step], namespace))
            if block is None:
                break
            path.append(block)
        return path

    def _touch(self, path: list[_Block]) -> None:
        if not path:
            return
        now = next(self._clock)
        for block in path:
            block.last_used = now
        self._queue(path[-1])

    def _queue(self, block: _Block) -> None:
        if block.children:
            return
        if len(self._leaves) > 64 + 4 * len(self._blocks):
            self._leaves = [(b.last_used, b.number, b) for b in self._blocks.values() if not b.children]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (block.last_used, block.number, block))

    def _remove(self, block: _Block) -> int:
        del self._blocks[block.key]
        if block.parent is not None:
            block.parent.children -= 1
            self._queue(block.parent)
        return self._pool.let_go(block.slots)


def _key(parent: _Block | None, tokens: bytes, namespace: bytes) -> tuple[int, bytes]:
    return (0, namespace + tokens) if parent is None else (parent.number, tokens)
