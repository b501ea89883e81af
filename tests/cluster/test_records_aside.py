"""A cell goes on while what it has recorded is encoded for who asks."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster import cell
from cluster.cell import Cell


class Record:
    """One that is encoded only once the cell has gone on."""

    def __init__(self) -> None:
        self.cell_goes_on = threading.Event()

    def encoded(self, *_: object) -> bytes:
        assert self.cell_goes_on.wait(10), "the cell waits for its record to be encoded"
        return b"record"


@pytest.mark.parametrize("asked", ["timeline", "decisions"])
async def test_requests_go_on_while_a_record_is_encoded(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record()
    monkeypatch.setattr(cell, "newest_decisions", record.encoded)
    shell = SimpleNamespace(timeline=SimpleNamespace(trace=record.encoded))
    asked_cell = cast(Any, SimpleNamespace(_shell=shell, core=None))
    answer = Cell.timeline(asked_cell) if asked == "timeline" else Cell.decisions(asked_cell, 9)
    waiting = asyncio.create_task(answer)
    await asyncio.sleep(0)
    record.cell_goes_on.set()
    assert await waiting == b"record"
