"""What launches the layers of a draft call on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from drafters.device_growth import Growth
from drafters.next_tokens import NextTokens, OnDevice, Sent
from engine.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Roots:
    """Next tokens of roots that only the device knows yet.

    Attributes:
        rows: pairs of a request's number and the row of `best` that is its root's.
        best: what a forward of committed tokens left.
    """

    rows: Sequence[tuple[int, int]]
    best: OnDevice


@dataclass(frozen=True, slots=True)
class BeamCall:
    """The beams of one draft call that grow on the device.

    Attributes:
        growths: of the call, those with most layers first.
        roots: next tokens of those whose first layer the device is to grow.
        model: what is forwarded; it takes rows from the device.
        kv: slot tables.
        num_choices: next tokens kept of each row.
    """

    growths: Sequence[Growth]
    roots: Sequence[Roots]
    model: NextTokens
    kv: KVCache
    num_choices: int


class DeviceLayers(Protocol):
    """The layers of one call's beams, those of requests with most layers first.

    Attributes:
        first_rows: of each request's rows, within a layer.
    """

    @property
    def first_rows(self) -> Sequence[int]:
        """See the class."""
        ...

    def launch(self, number: int) -> Sent:
        """Launch layer `number`, after those before it.

        Returns:
            what comes to the host. [requests, width] each: the rows' tokens; whether a row is a node that
            gets children; and the row of its parent. [rows, k] each: the best next tokens, and their
            log-probabilities.
        """
        ...
