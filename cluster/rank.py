"""One tensor-parallel rank of a target."""

from __future__ import annotations

import msgspec


class Rank(msgspec.Struct, frozen=True):
    """One tensor-parallel rank and where its group meets."""

    rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0


class RankAgreement:
    """Whether the ranks of one target decided the same: a rank after the first sends only its checksum."""

    def __init__(self) -> None:
        self._digests: dict[int, int] = {}
        self._is_broken = False

    def holds(self, call_id: int, digest: int) -> bool:
        """Take a rank's checksum of a call; whether it is that of the ranks before.

        Once it is not, it never is again: what such ranks compute together from then on is of no use.
        """
        if self._digests.setdefault(call_id, digest) != digest:
            self._is_broken = True
        self._digests.pop(call_id - 64, None)
        return not self._is_broken
