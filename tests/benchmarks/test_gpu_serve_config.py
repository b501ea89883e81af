"""The configuration that calls of a GPU session serve: whose drafters share the device with the target."""

from __future__ import annotations

import json

import pytest

from benchmarks import gpu_serve
from cluster.config import FlotillaConfig
from cluster.drafter_config import ModelDrafterConfig


def configured(capsys: pytest.CaptureFixture[str], *options: str) -> FlotillaConfig:
    assert gpu_serve.main(["config", *options]) == 0
    return FlotillaConfig.model_validate(json.loads(capsys.readouterr().out))


def models(config: FlotillaConfig) -> dict[str, ModelDrafterConfig]:
    return {one.name: one for one in config.drafters if isinstance(one, ModelDrafterConfig)}


def test_the_demo_family_is_served_unless_models_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    config = configured(capsys, "--num-gpus", "0.5")
    assert config.target.path == "zoo:target-8x384"
    assert list(models(config)) == ["general", "code"]
    assert config.target.heads is not None


def test_models_by_name_share_the_gpu_with_their_target(capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--num-gpus",
        "0.7",
        "--target",
        "/t",
        "--drafter",
        "/d",
        "--drafter",
        "tiny=zoo:drafter-code-2x128",
    )
    config = configured(capsys, *options, "--eagle", "/e")
    found = models(config)
    assert {name: one.path for name, one in found.items()} == {
        "small": "/d",
        "tiny": "zoo:drafter-code-2x128",
    }
    shares = [config.target.placement.num_gpus, *(one.placement.num_gpus for one in found.values())]
    assert sum(shares) <= 1.0
    assert {config.target.dtype, *(one.dtype for one in found.values())} == {"bfloat16"}
    assert config.target.heads == "/e"  # not the demo family's
    assert [one.kind for one in config.drafters] == ["model", "model", "eagle", "prompt_lookup"]
