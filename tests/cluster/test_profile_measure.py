"""Measuring a target of several ranks, without the ranks."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from cluster import profile_measure
from cluster.config import FlotillaConfig
from cluster.rank import Rank
from engine.runner import ModelShape


class Loaded:
    """A target, and what refers to it in turn, as captured forwards may."""

    def __init__(self) -> None:
        self.runner = SimpleNamespace(shape=ModelShape(8, 8, 1, 1), of=self)


def test_a_rank_leaves_its_group_when_nothing_is_left_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else NCCL would wait forever for captured forwards that sum over the group."""
    loaded: list[weakref.ref[Loaded]] = []
    left: list[bool] = []

    def build(config: Any, rank: Rank | None) -> Loaded:
        target = Loaded()
        loaded.append(weakref.ref(target))
        return target

    monkeypatch.setattr(profile_measure, "multiprocessing", MagicMock())
    monkeypatch.setattr(profile_measure, "build_target", build)
    monkeypatch.setattr(profile_measure, "measure_target", lambda target, **_: [])
    monkeypatch.setattr(profile_measure, "profile_heads", lambda target, **_: [])
    monkeypatch.setattr(profile_measure, "leave", lambda: left.append(loaded[-1]() is None))
    monkeypatch.setattr(profile_measure, "_fitted", MagicMock())
    monkeypatch.setattr(profile_measure, "new_profile", MagicMock())
    config = FlotillaConfig.model_validate({"target": {"path": "zoo:target-8x384", "tensor_parallel": 2}})
    profile_measure.measure_profile(config)
    profile_measure._measure_rank(config.target, Rank(1, 2))
    assert left == [True, True]
