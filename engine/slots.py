"""The pool of KV slots: which of them are free, and how many holders each of the others has."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


class OutOfSlots(Exception):
    """More KV slots were asked for than there are free ones; nothing was changed."""

    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(f"{wanted} KV slots wanted, {available} available")
        self.wanted = wanted
        self.available = available


class SlotPool:
    """Single-token slots 0 .. num_slots - 1 with reference counts; a slot is free at count zero.

    Some are kept by an index of prefixes, with a reference of its own (`keep`): those that nobody else holds
    are counted as they change, for a pool of a GPU has a million and is asked for each request of a step.
    All slot arrays are int32 [n] without duplicates. Every operation is O(n).
    """

    def __init__(self, num_slots: int) -> None:
        """Make a pool of `num_slots` free slots.

        Raises:
            ValueError: if `num_slots` is not positive.
        """
        if num_slots <= 0:
            raise ValueError(f"a slot pool needs at least one slot, not {num_slots}")
        self._references = np.zeros(num_slots, dtype=np.int32)
        self._kept = np.zeros(num_slots, dtype=np.bool_)
        self._num_kept = self._num_unused = 0
        # A stack held in descending order, so that fresh allocations come out as ascending runs: the
        # attention path reads those without gathering.
        self._free = np.arange(num_slots - 1, -1, -1, dtype=np.int32)
        self._num_free = num_slots

    def __len__(self) -> int:
        return len(self._references)

    @property
    def free_count(self) -> int:
        """Number of free slots."""
        return self._num_free

    @property
    def num_unused(self) -> int:
        """Slots that are kept and that nobody else holds."""
        return self._num_unused

    @property
    def kept(self) -> NDArray[np.bool_]:
        """bool [num_slots], which slots are kept. A live view: read only."""
        view = self._kept.view()
        view.flags.writeable = False
        return view

    @property
    def references(self) -> Int32:
        """int32 [num_slots], holders of each slot. A live view: read only."""
        view = self._references.view()
        view.flags.writeable = False
        return view

    def allocate(self, n: int) -> Int32:
        """Take `n` free slots, each with one reference: int32 [n], ascending where that costs nothing.

        Raises:
            OutOfSlots: if fewer than `n` are free; nothing is changed then.
            ValueError: if `n` is negative.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} slots")
        if n > self._num_free:
            raise OutOfSlots(n, self._num_free)
        top = self._num_free
        slots = self._free[top - n : top][::-1].copy()
        self._num_free = top - n
        self._references[slots] = 1
        return slots

    def retain(self, slots: Int32) -> None:
        """Add a reference to each of `slots`.

        Raises:
            ValueError: if one of them is free; nothing is changed then.
        """
        if len(slots) == 0:
            return
        counts = self._references[slots]
        if np.count_nonzero(counts <= 0):
            raise ValueError("cannot retain a free slot")
        self._references[slots] = counts + 1
        if self._num_kept:
            self._num_unused -= int(np.count_nonzero(self._kept[slots] & (counts == 1)))

    def keep(self, slots: Int32) -> None:
        """Add a reference to each of `slots` that counts as an index's: `num_unused` is about them.

        Raises:
            ValueError: if one of them is free, or kept; nothing is changed then.
        """
        if self._kept[slots].any():
            raise ValueError("cannot keep a slot twice")
        self.retain(slots)
        self._kept[slots] = True
        self._num_kept += len(slots)

    def let_go(self, slots: Int32) -> int:
        """Drop the index's reference from each of `slots`; returns how many became free.

        Raises:
            ValueError: if one of them is not kept; nothing is changed then.
        """
        if not self._kept[slots].all():
            raise ValueError("cannot let go of a slot that is not kept")
        self._num_unused -= int(np.count_nonzero(self._references[slots] == 1))
        self._kept[slots] = False
        self._num_kept -= len(slots)
        return self.release(slots)

    def release(self, slots: Int32) -> int:
        """Drop a reference from each of `slots`; returns how many became free.

        Raises:
            ValueError: if one of them is free already, or the last reference is an index's; nothing is
                changed then.
        """
        if len(slots) == 0:
            return 0
        counts = self._references[slots]
        if np.count_nonzero(counts <= 0):
            raise ValueError("cannot release a free slot")
        if self._num_kept:
            kept = self._kept[slots]
            if np.count_nonzero(kept & (counts == 1)):
                raise ValueError("cannot release what only an index holds")
            self._num_unused += int(np.count_nonzero(kept & (counts == 2)))
        self._references[slots] = counts - 1
        freed = slots[counts == 1]
        n = len(freed)
        top = self._num_free
        self._free[top : top + n] = freed[::-1]
        self._num_free = top + n
        return n

    def check_invariants(self) -> None:
        """Raise AssertionError unless the free stack is exactly the slots without references."""
        free = np.sort(self._free[: self._num_free])
        expected = np.flatnonzero(self._references == 0)
        if not np.array_equal(free, expected):
            raise AssertionError("free stack and reference counts disagree")
        if (self._references < 0).any():
            raise AssertionError("negative reference count")
        unused = int(np.count_nonzero(self._kept & (self._references == 1)))
        if unused != self._num_unused or int(np.count_nonzero(self._kept)) != self._num_kept:
            raise AssertionError("slots that are kept and their numbers disagree")
