"""How many KV slots fit: a worker's share of a device, less its weights and its largest forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.devices import Memory

NumSlots = int | Literal["auto"]

#: Fewer slots than this serve nobody.
LEAST_SLOTS = 64
#: `auto` on a CPU, where memory is the whole machine's: as many as the default of the configuration.
CPU_SLOTS = 32768
_GIB = 1 << 30


class NotEnoughMemory(Exception):
    """A model does not fit its share of the device; the message says what it needs and what is free."""


class Beside(NamedTuple):
    """What is to be loaded beside a model when its pool has been sized.

    Attributes:
        num_bytes: that it takes.
        bytes_per_slot: and for each slot of the pool.
    """

    num_bytes: int = 0
    bytes_per_slot: int = 0


NOTHING_BESIDE = Beside()


@dataclass(frozen=True, slots=True)
class KVBudget:
    """What a worker may use of a device.

    Attributes:
        device: its name, for messages.
        memory: of the device, after the weights were loaded and before KV is.
        fraction: share of all its memory for weights and KV together; the rest is for activations and for
            others. A worker that reserves a share of a GPU has that share of it.
        share: of the device that the worker reserved, at most 1.
        beside: what comes after the pool.
    """

    device: str
    memory: Memory
    fraction: float
    share: float = 1.0
    beside: Beside = NOTHING_BESIDE

    @property
    def bytes_left(self) -> int:
        """Bytes for KV: what is left of the budget, and no more than is free."""
        budget = int(self.memory.total * self.fraction * min(self.share, 1.0)) - self.memory.own
        # Free memory too is left with a margin: somebody else's activations may need it.
        return max(0, min(budget, int(self.memory.free * self.fraction)) - self.beside.num_bytes)

    def slots(self, bytes_per_slot: int) -> int:
        """As many as fit.

        Raises:
            NotEnoughMemory: if that is fewer than `LEAST_SLOTS`.
        """
        each = bytes_per_slot + self.beside.bytes_per_slot
        found = self.bytes_left // each
        if found < LEAST_SLOTS:
            raise NotEnoughMemory(self._message(LEAST_SLOTS, each))
        return int(found)

    def check(self, num_slots: int, bytes_per_slot: int) -> None:
        """Make sure that so many fit.

        Raises:
            NotEnoughMemory: if they do not.
        """
        # A number that was asked for may use what `fraction` leaves free: only the device limits it.
        each = bytes_per_slot + self.beside.bytes_per_slot
        if num_slots * each + self.beside.num_bytes > self.memory.free:
            raise NotEnoughMemory(self._message(num_slots, each))

    def _message(self, num_slots: int, bytes_per_slot: int) -> str:
        needed = num_slots * bytes_per_slot
        beside = self.beside.num_bytes
        most = max(0, self.memory.free - beside) // bytes_per_slot
        text = (
            f"{num_slots} KV slots need {_size(needed)} on {self.device} ({bytes_per_slot} bytes each); of "
            f"{_size(self.memory.total)}, {_size(self.memory.free)} are free"
        )
        text += f" and {_size(self.memory.own)} are taken by the weights" if self.memory.own else ""
        text += f", and what drafts beside the model needs {_size(beside)}" if beside else ""
        if self.bytes_left < min(needed, self.memory.free):
            text += f", and memory_fraction {self.fraction:g}"
            text += f" of a share of {self.share:g}" if self.share < 1 else ""
            text += f" leaves {_size(self.bytes_left)}"
        advice = f"num_slots of at most {most}, " if most >= LEAST_SLOTS else ""
        return f"{text}. Use {advice}a smaller dtype, more ranks (tensor_parallel) or a larger device"


def _size(number: int) -> str:
    return f"{number / _GIB:.1f} GiB" if number >= _GIB // 10 else f"{number / (1 << 20):.1f} MiB"
