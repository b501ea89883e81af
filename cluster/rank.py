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
    """Whether all ranks decided the same in each call: a rank after the first sends only its checksum."""

    def __init__(self) -> None:
        self._digests: dict[int, int] = {}

    def holds(self, call_id: int, digest: int) -> bool:
        """Take a rank's checksum of a call; whether it is that of the ranks before."""
        agrees = self._digests.setdefault(call_id, digest) == digest
        self._digests.pop(call_id - 64, None)
        return agrees
