"""What the configuration says of devices, what it refuses, and that it reaches the loader."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cluster import target as target_module
from cluster.config import FlotillaConfig, TargetConfig
from cluster.drafter_config import ModelDrafterConfig
from cluster.pool_drafter import build_pool_drafter
from cluster.target import build_target


def test_a_gpu_must_be_reserved_to_be_used() -> None:
    with pytest.raises(ValidationError, match=r"`device: cuda` needs `placement.num_gpus`.*GPUs are hidden"):
        TargetConfig(path="zoo:target-8x384", device="cuda")
    with pytest.raises(ValidationError, match="num_gpus"):
        ModelDrafterConfig(name="small", path="zoo:drafter", device="cuda")
    assert (
        TargetConfig.model_validate(
            {"path": "x", "device": "cuda", "placement": {"num_gpus": 1}}
        ).device_share
        == 1
    )


@pytest.mark.parametrize(("num_gpus", "share"), [(0, 1), (0.25, 0.25), (1, 1), (2, 1)])
def test_the_share_of_a_device_is_what_is_reserved(num_gpus: float, share: float) -> None:
    config = ModelDrafterConfig.model_validate(
        {"name": "small", "path": "x", "placement": {"num_gpus": num_gpus, "collocate": "target"}}
    )
    assert config.device_share == share


def beside_the_target(target_gpus: float, **drafter: Any) -> FlotillaConfig:
    return FlotillaConfig.model_validate(
        {
            "target": {"path": "x", "placement": {"num_gpus": target_gpus}},
            "drafters": [{"kind": "model", "name": "small", "path": "y", **drafter}],
        }
    )


def test_a_model_beside_a_target_on_a_gpu_has_a_share_of_it_or_says_that_it_needs_none() -> None:
    with pytest.raises(ValidationError, match=r"`small`.*no share of the target's GPU.*0\.8 and 0\.2"):
        beside_the_target(1, placement={"collocate": "target"})
    assert beside_the_target(0.8, placement={"num_gpus": 0.2, "collocate": "target"})
    assert beside_the_target(1, device="cpu", placement={"collocate": "target"})
    assert beside_the_target(0, placement={"collocate": "target"})
    assert beside_the_target(1, placement={"num_cpus": 1})


def test_slots_are_a_number_or_auto() -> None:
    assert TargetConfig(path="x", num_slots="auto").num_slots == "auto"
    for wrong in ("all", 63):
        with pytest.raises(ValidationError, match="num_slots"):
            FlotillaConfig.model_validate({"target": {"path": "x", "num_slots": wrong}})


def test_settings_reach_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader is replaced by one that notes its arguments; tests/engine tests what it does with them."""
    asked: list[dict[str, Any]] = []

    class Noted(Exception):
        pass

    def note(path: object, **arguments: Any) -> None:
        asked.append(arguments)
        raise Noted

    monkeypatch.setattr(target_module, "load_runner", note)
    monkeypatch.setattr("engine.loading.load_runner", note)
    settings: dict[str, Any] = {
        "device": "auto",
        "memory_fraction": 0.5,
        "num_slots": "auto",
        "attention": "padded",
        "cuda_graphs": False,
        "placement": {"num_gpus": 0.5},
    }
    path = "zoo:target-8x384"
    with pytest.raises(Noted):
        build_target(TargetConfig.model_validate({"path": path, **settings}))
    drafter = ModelDrafterConfig.model_validate({"name": "small", "path": path, **settings})
    with pytest.raises(Noted):
        build_pool_drafter(drafter, 4096, 512, path)
    for arguments in asked:
        assert str(arguments["device"]) in ("auto", "cpu", "cuda:0")
        assert {name: arguments[name] for name in ("memory_fraction", "device_share", "num_slots")} == {
            "memory_fraction": 0.5,
            "device_share": 0.5,
            "num_slots": "auto",
        }
        assert (arguments["attention"], arguments["graphs"]) == ("padded", False)


@pytest.mark.parametrize(
    ("asked", "num_gpus", "is_busy"),
    [("auto", 0.0, False), ("auto", 0.5, True), ("auto", 1.0, True), (False, 1.0, False), (True, 0.0, True)],
)
def test_messages_are_looked_for_without_pause_where_the_target_is_on_gpus(
    asked: str | bool, num_gpus: float, is_busy: bool
) -> None:
    raw = {
        "target": {"path": "x", "placement": {"num_gpus": num_gpus}},
        "scheduler": {"busy_polling": asked},
    }
    assert FlotillaConfig.model_validate(raw).is_busy_polling is is_busy
