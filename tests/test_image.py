"""The Dockerfile and its constraints agree with the project; building it needs an engine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = dict(
    line.split("==")
    for line in (ROOT / "image" / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)
EXTRAS = ("gpu", "otel")


def requirements() -> list[Requirement]:
    project = PYPROJECT["project"]
    lines = [*project["dependencies"]]
    for extra in EXTRAS:
        lines += project["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_every_dependency_is_pinned_within_its_range(requirement: Requirement) -> None:
    version = PINS[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version, prereleases=True)


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert all((ROOT / name).exists() for name in kept)
    for source in re.findall(r"^COPY (?!--from)(\S+) ", DOCKERFILE, flags=re.MULTILINE):
        assert source == "." or source.partition("/")[0] in kept
    # Everything that the wheel is made of.
    assert {package.partition(".")[0] for package in PYPROJECT["tool"]["setuptools"]["packages"]} <= kept


def test_stages_are_named_and_defined_before_use() -> None:
    defined: set[str] = set()
    for line in DOCKERFILE.splitlines():
        used = re.search(r"--from=(\S+)", line)
        assert used is None or used[1] in defined
        stage = re.fullmatch(r"FROM \$\{(?:PYTHON|CUDA)_IMAGE\} AS (\S+)", line)
        assert not line.startswith("FROM") or stage is not None
        if stage:
            defined.add(stage[1])
    assert {"cpu", "cuda"} <= defined


def test_images_run_as_a_user_and_have_what_probes_call() -> None:
    for stage in ("cpu", "cuda"):
        body = re.search(rf"AS {stage}\n(.*?)(?=\nFROM|\Z)", DOCKERFILE, flags=re.DOTALL)
        assert body is not None
        assert "USER 1000:1000" in body[1]
        assert "wget" in body[1]


def test_a_container_that_is_stopped_has_only_its_command_told() -> None:
    """With its Ray told as well, `flotilla serve` took 38 s to end, and `docker stop` kills after ten."""
    assert re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, flags=re.MULTILINE) == ['["tini", "--"]'] * 2


def test_versions_agree_with_the_project_and_the_chart() -> None:
    version = PYPROJECT["project"]["version"]
    assert f"flotilla:{version} ." in DOCKERFILE
    values = (ROOT / "helm" / "flotilla" / "values.yaml").read_text()
    assert f'rayVersion: "{PINS["ray"]}"' in values
