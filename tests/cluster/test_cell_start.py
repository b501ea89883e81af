"""What a cell says that cannot start."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import RayTaskError

from cluster.cell import Cell
from cluster.config import FlotillaConfig, TargetConfig
from cluster.lifecycle import Lifecycle


async def test_why_a_target_does_not_load_is_told_without_the_way_the_error_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker's error comes through Ray with its traceback, of no use to who wrote a setting wrong."""

    async def nothing(*_: object) -> None:
        return None

    async def refuse(_: Lifecycle) -> None:
        why = ValueError("max_model_len 4096 is more than the model takes: 1024")
        raise RayTaskError("load", f"Traceback (most recent call last):\n  File ...\n{why!r}", why)

    monkeypatch.setattr(Lifecycle, "take_over", nothing)
    monkeypatch.setattr(Lifecycle, "reserve", nothing)
    monkeypatch.setattr(Lifecycle, "load_first_target", refuse)
    cell = Cell(FlotillaConfig(target=TargetConfig(path="unused")))
    async with asyncio.timeout(10):
        await cell._starting
    assert (await cell.describe())["failure"] == (
        "the cell could not start while loading the target: "
        "max_model_len 4096 is more than the model takes: 1024"
    )
    with pytest.raises(RuntimeError, match="could not start while loading the target: max_model_len"):
        await cell.check_health()
