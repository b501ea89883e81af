"""One tensor-parallel rank of a target."""

from __future__ import annotations

import msgspec


class Rank(msgspec.Struct, frozen=True):
    """One tensor-parallel rank and where its group meets."""

    rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
