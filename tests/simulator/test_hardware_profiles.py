"""Profiles of models on accelerators: what is in them, and what is no profile."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cluster.cost_model import CostProfile
from cluster.linear_cost import LinearCost
from deployments.demo import demo_config
from engine.model_size import count_parameters
from simulator import hardware
from zoo.registry import weights_dir


def test_the_demo_familys_has_its_drafters_sizes() -> None:
    """Without them the selector that goes by size sorts drafters by their names."""
    paths = {
        drafter.name: drafter.path.removeprefix("zoo:")
        for drafter in demo_config().drafters
        if drafter.kind == "model"
    }
    drafters = hardware.load("demo-2-cores").drafters
    assert {name: held.num_parameters for name, held in drafters.items()} == {
        name: count_parameters(weights_dir(path)) for name, path in paths.items()
    }


def test_what_is_no_profile_is_told(tmp_path: Path) -> None:
    path, known = tmp_path / "other.json", hardware.load("llama-8b-h100")
    path.write_bytes(msgspec.json.encode(CostProfile(target=LinearCost(delta=1.0), drafters={})))
    with pytest.raises(ValueError, match=r"other\.json is not a hardware profile.*`flotilla profile` writes"):
        hardware.load(str(path))
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(known, cost=LinearCost(delta=-1.0))))
    with pytest.raises(ValueError, match=r"other\.json: costs below 0, of the target: delta"):
        hardware.load(str(path))
