"""A result is another one's when any code it depends on has changed, and only then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import code_version, environment
from benchmarks.code_version import files_of, version_of
from cluster.config import FlotillaConfig
from deployments.demo import demo_config


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Code of ours: `run` uses `ours.parts`, and that uses `ours.deep` when it is called."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "run.py").write_text("import numpy\nfrom ours import parts\n")
    (tmp_path / "ours" / "__init__.py").write_text("")
    (tmp_path / "ours" / "parts.py").write_text("def late():\n    import ours.deep\n")
    (tmp_path / "ours" / "deep.py").write_text("A = 1\n")
    (tmp_path / "ours" / "apart.py").write_text("B = 1\n")
    (tmp_path / "table.json").write_text("{}")
    monkeypatch.setattr(code_version, "_ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "changed", ["run.py", "ours/__init__.py", "ours/parts.py", "ours/deep.py", "table.json"]
)
def test_whatever_a_result_depends_on_counts(folder: Path, changed: str) -> None:
    before = version_of("run", [folder / "table.json"])
    assert version_of("run", [folder / "table.json"]) == before
    with (folder / changed).open("a") as file:
        file.write("\n")
    assert version_of("run", [folder / "table.json"]) != before


def test_what_it_does_not_use_does_not_count(folder: Path) -> None:
    before = version_of("run")
    (folder / "ours" / "apart.py").write_text("B = 2\n")
    (folder / "table.json").write_text("[]")
    assert version_of("run") == before


def test_a_comparison_depends_on_what_its_cell_runs() -> None:
    """Its record goes on only with the code that began it."""
    names = {str(path.relative_to(code_version._ROOT)) for path in files_of("benchmarks.compare")}
    assert {
        "cluster/policies/flotilla.py",
        "selector/flotilla.py",
        "engine/tree.py",
        "drafters/model_drafter.py",
        "verifier/verifier.py",
    } <= names


@pytest.mark.thorough
def test_a_record_holds_the_configuration_itself_and_not_where_it_lay() -> None:
    config = demo_config()
    record = json.loads(json.dumps(environment.of_cell(config, "benchmarks.pool")))
    assert FlotillaConfig.model_validate(record["cell"]) == config
    assert record["code version"] == version_of("benchmarks.pool")
