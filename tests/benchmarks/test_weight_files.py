"""A comparison goes on only with the weights it began with, wherever they lie."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.weight_files import fingerprint, fingerprints
from cluster.config import FlotillaConfig
from deployments.demo import demo_config
from zoo.registry import TARGET, weights_dir


def test_other_weights_at_the_same_path_are_told_apart(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(weights_dir(TARGET), folder)
    config = FlotillaConfig.model_validate({"target": {"path": str(folder)}, "drafters": []})
    before = fingerprints(config)
    assert before == {str(folder): fingerprint(weights_dir(TARGET))}
    (file,) = folder.glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert fingerprints(config) != before
    file.write_bytes(whole)
    (folder / "config.json").touch()
    assert fingerprints(config) == before
    shutil.rmtree(folder)
    assert fingerprints(config) == {}


def test_every_model_of_a_cell_counts() -> None:
    config = demo_config()
    models = {drafter.path for drafter in config.drafters if drafter.kind == "model"}
    found = fingerprints(config)
    assert found.keys() == {config.target.path, *models}
    assert len(set(found.values())) == len(found) > 2
