"""A stored cost profile is read as it was written, and refused where it would mislead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.config import FlotillaConfig
from cluster.linear_cost import LinearCost, StepPoint
from cluster.local import LocalEngine
from cluster.profile_file import (
    VERSION,
    ModelProfile,
    ProfileError,
    ProfileFile,
    identify_drafter,
    identify_target,
    load_profile,
    new_profile,
    read_profile,
)
from cluster.profile_fit import fit_held_out
from deployments import preflight

DRAFTERS = [
    {"kind": "model", "name": "summary", "path": "zoo:drafter-summary-1x128"},
    {"kind": "prompt_lookup", "name": "lookup"},
]


def configuration(**changes: Any) -> FlotillaConfig:
    target = {"path": "zoo:target-8x384", "num_slots": 1024}
    return FlotillaConfig.model_validate(
        {"target": target, "drafters": DRAFTERS, "http": {"port": 0}} | changes
    )


def profile_of(config: FlotillaConfig) -> ProfileFile:
    machine = LinearCost(alpha=1e-6, gamma=1e-4, delta=3e-3)
    points = [StepPoint(1, t, c, machine.seconds(1, t, c)) for t in (1, 2, 4, 8, 16, 32) for c in (0, 99)]
    fit = fit_held_out(points)
    drafters = {d.name: ModelProfile.of(identify_drafter(d), points, fit) for d in config.drafters}
    return new_profile("cpu", ModelProfile.of(identify_target(config.target), points, fit), drafters)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    profile_of(configuration()).save(path)
    return path


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_is_written_is_read(path: Path) -> None:
    written = read_profile(path)
    written.save(path)
    assert read_profile(path) == written
    costs, warnings = load_profile(path, configuration())
    assert costs.target == written.target.cost
    assert costs.drafters == {name: model.cost for name, model in written.drafters.items()}
    assert warnings == []


def test_drafters_not_configured_are_left_out(path: Path) -> None:
    costs, _ = load_profile(path, configuration(drafters=DRAFTERS[1:]))
    assert list(costs.drafters) == ["lookup"]


def test_an_equal_architecture_elsewhere_costs_the_same(path: Path, tmp_path: Path) -> None:
    directory = tmp_path / "fine-tuned"
    directory.mkdir()
    source = Path("zoo/weights/drafter-summary-1x128/config.json")
    config = json.loads(source.read_text()) | {"transformers_version": "6.0"}
    (directory / "config.json").write_text(json.dumps(config))
    moved = configuration(drafters=[DRAFTERS[0] | {"path": str(directory)}])
    assert load_profile(path, moved)[1] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": {"path": "zoo:drafter-general-2x192"}}, "another model as the target.*zoo:target-8x384"),
        ({"target": {"path": "zoo:target-8x384", "dtype": "bfloat16"}}, "dtype 'float32' for the target"),
        ({"target": {"path": "zoo:target-8x384", "tensor_parallel": 2}}, "tensor_parallel 1 for the target"),
        (
            {"drafters": [DRAFTERS[0] | {"path": "zoo:drafter-code-2x128"}]},
            "another model as drafter `summary`",
        ),
        ({"drafters": [DRAFTERS[1] | {"name": "summary"}]}, "kind 'model' for drafter `summary`"),
        ({"drafters": [DRAFTERS[1] | {"max_ngram": 8}]}, "another model as drafter `lookup`"),
        (
            {"drafters": [DRAFTERS[1] | {"name": "new"}]},
            r"no costs of drafter `new` \(it has summary, lookup\)",
        ),
    ],
)
def test_a_profile_of_something_else_is_refused(path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=f"(?s){message}.*flotilla profile"):
        load_profile(path, configuration(**changes))


def test_a_target_that_takes_no_time_is_refused(path: Path) -> None:
    profile = json.loads(path.read_text())
    profile["target"]["cost"] = {"alpha": 1e-6}  # without context
    path.write_text(json.dumps(profile))
    with pytest.raises(ProfileError, match=r"take no time.*flotilla profile"):
        load_profile(path, configuration())


def test_another_version_is_refused(path: Path) -> None:
    edit(path, version=VERSION + 1)
    with pytest.raises(
        ProfileError, match=rf"another version \({VERSION + 1}, not {VERSION}\).*flotilla profile"
    ):
        read_profile(path)
    # What was written before versions were.
    path.write_text('{"target": {"alpha": 0, "gamma": 0.1, "rho": 0, "delta": 0}, "drafters": {}}')
    with pytest.raises(ProfileError, match="another version"):
        read_profile(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[1]", "another version"), (f'{{"version": {VERSION}}}', "missing required field")],
)
def test_what_is_no_profile_is_refused(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(ProfileError, match=message):
        read_profile(path)


def test_other_hardware_and_libraries_are_warned_of(path: Path) -> None:
    raw = json.loads(path.read_text())
    machine, packages = raw["machine"], raw["packages"]
    edit(path, machine=machine | {"processor": "Z80", "gpus": ["T4"]}, packages=packages | {"torch": "1.0"})
    _, warnings = load_profile(path, configuration())
    assert len(warnings) == 3
    assert "processor was 'Z80'" in warnings[0]
    assert "gpus was ['T4'] and is []" in warnings[1]
    assert "torch 1.0; installed is" in warnings[2]


def test_a_start_is_refused_or_warned_before_anything_is_loaded(path: Path) -> None:
    config = configuration(profile=str(path))
    assert preflight.check(config) == []
    edit(path, clock="wall", packages={})
    assert all("measured with" in warning for warning in preflight.check(config))
    edit(path, version=1)
    with pytest.raises(preflight.StartError, match="another version"):
        preflight.check(config)


def test_the_local_engine_plans_by_the_file(path: Path) -> None:
    engine = LocalEngine(configuration(profile=str(path)), drafters={})
    assert engine.core.cost.profile.target == read_profile(path).target.cost
