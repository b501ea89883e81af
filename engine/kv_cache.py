"""Which KV slots hold which request's tokens. Numbers only: the data is the model runner's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.prefix_cache import BLOCK_TOKENS, PrefixCache
from engine.slots import OutOfSlots, SlotPool

Int32 = NDArray[np.int32]


class _Table:
    """One request's slots: the committed ones in order of position, and those reserved for coming rows."""

    __slots__ = ("length", "namespace", "number", "reserved", "slots")

    def __init__(self, number: int, slots: Int32, namespace: bytes) -> None:
        self.number = number
        self.namespace = namespace
        self.slots = np.empty(max(64, 2 * len(slots)), dtype=np.int32)
        self.slots[: len(slots)] = slots
        self.length = len(slots)
        self.reserved: list[Int32] = []

    def append(self, slots: Int32) -> None:
        end = self.length + len(slots)
        if end > len(self.slots):
            grown = np.empty(2 * end, dtype=np.int32)
            grown[: self.length] = self.slots[: self.length]
            self.slots = grown
        self.slots[self.length : end] = slots
        self.length = end


class KVCache:
    """Slot tables of all requests of one worker over one pool, with shared prefixes.

    A request's rows take reserved slots; the accepted ones are committed to its table, the others
    discarded. Commit and rollback move slot numbers, never data. Methods that name a request raise
    KeyError if it is not open.
    """

    def __init__(self, num_slots: int, *, prefix_sharing: bool = True) -> None:
        """Make an empty cache over slots 0 .. num_slots - 1.

        Raises:
            ValueError: if `num_slots` is not positive.
        """
        self._pool = SlotPool(num_slots)
        self._prefixes = PrefixCache(self._pool) if prefix_sharing else None
        self._tables: dict[str, _Table] = {}
        # Number of the table each slot is reserved for, 0 for none: makes commit and discard O(n).
        self._reserved_for = np.zeros(num_slots, dtype=np.int64)
        self._next_number = 1

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._tables

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def num_slots(self) -> int:
        """Slots in the pool."""
        return len(self._pool)

    @property
    def free_slots(self) -> int:
        """Slots that `reserve` can give out, those of evictable shared prefixes included."""
        evictable = self._prefixes.evictable_slots if self._prefixes is not None else 0
        return self._pool.free_count + evictable

    @property
    def empty_slots(self) -> int:
        """Slots that `reserve` can give out without evicting anything."""
        return self._pool.free_count

    def open(self, request_id: str, tokens: Sequence[int] | Int32, namespace: bytes = b"") -> int:
        """Start a request whose sequence begins with `tokens`; returns how many of them are cached.

        Prefixes are shared within a namespace: what keys and values depend on besides the tokens.

        At most `len(tokens) - 1` are reported, since a forward pass needs one input row.

        Raises:
            ValueError: if the request is open already.
        """
        if request_id in self._tables:
            raise ValueError(f"request {request_id!r} is already open")
        shared = np.empty(0, dtype=np.int32)
        if self._prefixes is not None and len(tokens) > 1:
            matched = self._prefixes.match(np.asarray(tokens, dtype=np.int32), namespace)
            shared = matched[: len(tokens) - 1]
            self._pool.retain(shared)
        self._tables[request_id] = _Table(self._next_number, shared, namespace)
        self._next_number += 1
        return len(shared)

    def would_share(self, tokens: Sequence[int], other: Sequence[int], namespace: bytes = b"") -> bool:
        """Whether a request that begins with `tokens` would find more cached once `other` is published.

        Both are of one namespace.
        """
        if self._prefixes is None:
            return False
        matched = self._prefixes.num_matched(np.asarray(tokens, dtype=np.int32), namespace)
        common = matched + BLOCK_TOKENS
        return len(other) >= common and list(tokens[:common]) == list(other[:common])

    def length(self, request_id: str) -> int:
        """Committed tokens of the request."""
        return self._tables[request_id].length

    def past(self, request_id: str) -> Int32:
        """int32 [length], slots of the committed tokens in order. A view, valid until the next change."""
        table = self._tables[request_id]
        return table.slots[: table.length]

    def reserve(self, request_id: str, n: int) -> Int32:
        """Take `n` slots, int32 [n], for rows of coming forwards, evicting shared prefixes if needed.

        Raises:
            OutOfSlots: if even evicting is not enough; nothing is changed then.
        """
        table = self._tables[request_id]
        slots = self._taken(n)
        self._reserved_for[slots] = table.number
        table.reserved.append(slots)
        return slots

    def reserve_all(self, wanted: Sequence[tuple[str, int]]) -> list[Int32]:
        """`reserve` for several requests, each named once, for little more than one costs.

        Raises:
            OutOfSlots: if there are not enough for all; nothing is changed then.
        """
        tables = [self._tables[request_id] for request_id, _ in wanted]
        counts = [n for _, n in wanted]
        slots = self._taken(sum(counts))
        self._reserved_for[slots] = np.repeat([table.number for table in tables], counts)
        parts = []
        first = 0
        for table, n in zip(tables, counts, strict=True):
            part = slots[first : first + n]
            table.reserved.append(part)
            parts.append(part)
            first += n
        return parts

    def _taken(self, n: int) -> Int32:
        """`n` slots of the pool, evicting if needed; OutOfSlots changes nothing."""
        missing = n - self._pool.free_count
        if missing > 0:
            available = self.free_slots
            if n > available or self._prefixes is None:
                raise OutOfSlots(n, available)
            self._prefixes.evict(missing)
        return self._pool.allocate(n)

    def settle_all(self, rows: Sequence[tuple[str, Int32, Sequence[int]]]) -> None:
        """Commit some of the slots that requests have reserved, and free the others.

        As `commit` and then `discard` of each, for little more than one of them costs.

        Args:
            rows: per request, each named once: its name, all slots it has reserved as `reserve` gave them,
                and which of these are committed, ascending indices.

        Raises:
            ValueError: if other slots are reserved for a request, or an index is not one of a slot, or comes
                twice; nothing is changed then.
        """
        if not rows:
            return
        tables = [self._tables[request_id] for request_id, _, _ in rows]
        slots = np.concatenate([reserved for _, reserved, _ in rows])
        is_dropped = np.ones(len(slots), dtype=np.bool_)
        first = 0
        kept: list[int] = []
        for table, (request_id, reserved, chosen) in zip(tables, rows, strict=True):
            if len(table.reserved) != 1 or table.reserved[0] is not reserved:
                raise ValueError(f"slots to settle are not what is reserved for request {request_id!r}")
            if len(chosen) and not 0 <= min(chosen) <= max(chosen) < len(reserved):
                raise ValueError(f"no such slots are reserved for request {request_id!r}")
            kept += [first + index for index in chosen]
            first += len(reserved)
        is_dropped[kept] = False
        if np.count_nonzero(is_dropped) != len(slots) - len(kept):
            raise ValueError("a slot is to be committed twice")
        for table, (_, reserved, chosen) in zip(tables, rows, strict=True):
            # Most often all of the first rows: a view of them is enough.
            is_prefix = len(chosen) == 0 or chosen[-1] == len(chosen) - 1
            table.append(reserved[: len(chosen)] if is_prefix else reserved[list(chosen)])
            table.reserved = []
        self._reserved_for[slots] = 0
        self._pool.release(slots[is_dropped])

    def commit(self, request_id: str, slots: Int32) -> None:
        """Append reserved `slots`, int32 [n] in order of position, to the request's table.

        Raises:
            ValueError: if one of them is not reserved for this request, or appears twice; nothing is
                changed then.
        """
        table = self._tables[request_id]
        is_other = self._reserved_for[slots] != table.number
        if np.count_nonzero(is_other) or len(set(slots.tolist())) != len(slots):
            raise ValueError(f"slots to commit are not reserved for request {request_id!r}")
        self._reserved_for[slots] = 0
        table.append(slots)
        rest = [kept[self._reserved_for[kept] == table.number] for kept in table.reserved]
        table.reserved = [kept for kept in rest if len(kept)]

    def discard(self, request_id: str, keep: Sequence[Int32] = ()) -> None:
        """Free the reserved slots of the request that were not committed, but for those in `keep`.

        Raises:
            ValueError: if a slot to keep is not reserved for this request; nothing is changed then.
        """
        table = self._tables[request_id]
        if any(np.count_nonzero(self._reserved_for[slots] != table.number) for slots in keep):
            raise ValueError(f"slots to keep are not reserved for request {request_id!r}")
        for slots in keep:
            self._reserved_for[slots] = 0
        for slots in table.reserved:
            gone = slots[self._reserved_for[slots] == table.number] if keep else slots
            self._reserved_for[gone] = 0
            self._pool.release(gone)
        table.reserved = list(keep)
        for slots in keep:
            self._reserved_for[slots] = table.number

    def truncate(self, request_id: str, length: int) -> None:
        """Forget the committed tokens from position `length` on.

        Raises:
            ValueError: if `length` is negative or more than the request has.
        """
        table = self._tables[request_id]
        if not 0 <= length <= table.length:
            raise ValueError(f"cannot truncate {table.length} tokens to {length}")
        self._pool.release(table.slots[length : table.length])
        table.length = length

    def publish(self, request_id: str, tokens: Sequence[int] | Int32) -> None:
        """Let later requests share the full blocks of the committed prefix, which holds `tokens`.

        `tokens` may be shorter or longer than what is committed. Blocks that another request published
        first replace this request's own, which become free.
        """
        table = self._tables[request_id]
        if self._prefixes is None:
            return
        own = table.slots[: min(table.length, len(tokens))]
        kept = self._prefixes.insert(np.asarray(tokens[: len(own)], dtype=np.int32), own, table.namespace)
        own = own[: len(kept)]
        differs = kept != own
        if differs.any():
            replaced = own[differs]
            self._pool.retain(kept[differs])
            table.slots[: len(kept)] = kept
            self._pool.release(replaced)

    def release(self, request_id: str) -> None:
        """End a request: everything it holds is released; published prefixes stay until evicted."""
        self.discard(request_id)
        table = self._tables.pop(request_id)
        self._pool.release(table.slots[: table.length])

    def check_invariants(self) -> None:
        """Raise AssertionError unless reference counts are exactly what tables and index explain."""
        self._pool.check_invariants()
        expected = np.zeros(len(self._pool), dtype=np.int32)
        reserved = np.zeros(len(self._pool), dtype=np.int64)
        for table in self._tables.values():
            np.add.at(expected, table.slots[: table.length], 1)
            for slots in table.reserved:
                reserved[slots] = table.number
                np.add.at(expected, slots, 1)
        if not np.array_equal(reserved, self._reserved_for):
            raise AssertionError("reservations and tables disagree")
        if self._prefixes is not None:
            self._prefixes.check_invariants()
            expected += self._prefixes.held
        if not np.array_equal(expected, self._pool.references):
            raise AssertionError("reference counts are not explained by tables and shared prefixes")
