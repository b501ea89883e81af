"""What a cell says that cannot start."""

from __future__ import annotations

import asyncio
from unittest import mock

import pytest
from ray.exceptions import RayTaskError

from cluster.cell import Cell
from cluster.config import FlotillaConfig, TargetConfig
from cluster.cost_model import DEFAULT_PROFILE, CostProfile
from cluster.events import DrafterReady
from cluster.lifecycle import Lifecycle, cause
from cluster.linear_cost import StepPoint
from cluster.worker import Worker
from cluster.worker_set import WorkerSet
from deployments.demo import demo_config
from drafters.protocol import Capabilities
from engine.unsupported_model import UnsupportedModel

CAPABILITIES = Capabilities(
    kind="model",
    max_depth=4,
    max_width=1,
    has_probabilities=True,
    needs_prefill=True,
    vocab_size=8,
    max_tokens=8,
)


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


@pytest.mark.parametrize(
    ("why", "told"),
    [
        (UnsupportedModel("the model attends to a window"), "drafter `small`: the model attends to a window"),
        (ValueError("drafter `small` has another tokenizer"), "drafter `small` has another tokenizer"),
    ],
)
async def test_a_drafter_that_does_not_load_is_named(
    why: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: object, **__: object) -> None:
        return None

    async def load(_: WorkerSet, name: str, *__: object) -> DrafterReady:
        if name == "small":
            raise RayTaskError("load", f"Traceback (most recent call last):\n  File ...\n{why!r}", why)
        return DrafterReady(name, CAPABILITIES, 1, kind=name)

    monkeypatch.setattr(Lifecycle, "take_over", nothing)
    monkeypatch.setattr(Lifecycle, "reserve", nothing)
    monkeypatch.setattr(Lifecycle, "load_first_target", nothing)
    monkeypatch.setattr(WorkerSet, "load_drafter", load)
    drafters = [{"kind": "model", "name": name, "path": "unused"} for name in ("large", "small")]
    config = FlotillaConfig.model_validate({"target": {"path": "unused"}, "drafters": drafters})
    cell = Cell(config)
    async with asyncio.timeout(10):
        await cell._starting
    assert (await cell.describe())["failure"] == f"the cell could not start while loading drafters: {told}"


async def test_a_model_too_small_to_be_measured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own pool is what an operator may have made too small: of several models it must be said which."""

    async def measured(*_: object) -> list[StepPoint]:
        return [StepPoint(1, width, 32, 0.01) for width in (1, 2, 4)]

    monkeypatch.setattr(WorkerSet, "_watched", measured)
    workers = WorkerSet(demo_config(), b"token", mock.Mock(), mock.Mock())
    workers.workers["small"] = Worker("small", actors=[mock.Mock()])
    with pytest.raises(ValueError, match="only 3 shapes") as refused:
        await workers.measure_drafter("small")
    told = cause(refused.value)
    assert told.startswith("drafter `small`: only 3 shapes of forwards fit")
    assert "(`num_slots`)" in told


async def test_a_cell_that_no_longer_looks_after_its_workers_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would go on as it is: without a line in the log, and with workers that stall for ever."""

    async def taken(_: Lifecycle) -> tuple[CostProfile, list[DrafterReady]]:
        return DEFAULT_PROFILE, []

    def fail(_: Lifecycle) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Lifecycle, "take_over", taken)
    monkeypatch.setattr(Lifecycle, "leave_record", fail)
    cell = Cell(FlotillaConfig(target=TargetConfig(path="unused")))
    async with asyncio.timeout(10):
        await cell._starting
        await cell.check_health()
        while not cell._failure:
            await asyncio.sleep(0.05)
    with pytest.raises(RuntimeError, match="no longer looks after its workers: no space left"):
        await cell.check_health()
    await cell._clients.close()
