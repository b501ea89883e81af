"""The pool follows what its scaling decides, also where drafters come and go meanwhile."""

from __future__ import annotations

from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

from cluster.config import FlotillaConfig
from cluster.pool_scaling import PoolScaling


async def test_a_kind_that_is_removed_just_then_and_added_again_is_scaled_again() -> None:
    raw = {
        "target": {"path": "unused"},
        "drafters": [{"kind": "prompt_lookup", "name": "lookup"}],
        "scaling": {"drafters": {"enabled": True, "sustained_s": 0.0, "cooldown_s": 0.0}},
    }
    config = FlotillaConfig.model_validate(raw)
    changes: list[Coroutine[Any, Any, None]] = []
    kinds = {drafter.name: drafter for drafter in config.drafters}
    alive = SimpleNamespace(state="ready")
    lifecycle = SimpleNamespace(
        target=SimpleNamespace(num_slots=1), kinds=kinds, of_kind=lambda kind: [alive], spawn=changes.append
    )
    selector = SimpleNamespace(prices=lambda: {"lookup": 1e3})
    core = SimpleNamespace(running={"a": None}, pool=SimpleNamespace(drafters={}, selector=selector))
    asked: list[int] = []

    async def scale(kind: str, replicas: int, wait_s: float) -> None:
        asked.append(replicas)

    parts = (lifecycle, SimpleNamespace(scale=scale), SimpleNamespace(core=core))
    scaling = PoolScaling(config, *cast(Any, parts))
    scaling.look(0.0)
    (removed,) = kinds.items()
    kinds.clear()
    await changes.pop()
    assert not asked
    kinds.update([removed])
    scaling.look(100.0)
    assert len(changes) == 1
    changes.pop().close()
