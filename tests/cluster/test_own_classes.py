"""Policies and selectors of one's own, by import path: those that the documentation shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.config import FlotillaConfig, PolicyConfig
from cluster.policies.registry import make_policy
from cluster.recorded_core import make_core
from selector.registry import make_selector
from simulator.systems import parse
from tests.cluster.simulated import submit
from tests.cluster.test_core import World

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of docs/policies.md and docs/selection.md can be imported."""
    for page in ("policies.md", "selection.md"):
        (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
        (name,) = re.findall(r"^# (my_\w+\.py)", code)
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("policy", "selector"), [("my_policies.Likely", "flotilla"), ("fixed", "my_selectors.Likeliest")]
)
def test_they_serve(policy: str, selector: str) -> None:
    world = World(3, policy, selector=selector)
    for number in range(12):
        world.send(submit(number, world.rng))
    world.drain()
    world.check_ends()
    assert world.core.totals.accepted_tokens > 0


def test_they_are_recorded_and_simulated() -> None:
    system = parse("my_policies.Likely/fcfs")
    assert system.config.policy.name == "my_policies.Likely"
    config = FlotillaConfig.model_validate(
        {"target": {"path": "unused"}, "policy": {"name": "my_policies.Likely"}, "debug": {"decisions": 10}}
    )
    assert make_core(config, World(0, "fixed").core.cost).config is config


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module.Policy", "cannot be imported: No module named 'no_such_module'.*PYTHONPATH"),
        ("my_policies.Unlikely", "cannot be imported"),
        ("math.pi", "it cannot be called"),
    ],
)
def test_what_cannot_be_imported_is_said(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"the policy `{name}` .*{message}"):
        make_policy(PolicyConfig(name=name))
    with pytest.raises(ValueError, match=f"the selector `{name}` .*{message}"):
        make_selector(name)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import os; os.environ['NOT_THERE']", "KeyError: 'NOT_THERE'"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_a_module_that_fails_at_its_import_is_said(
    module: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script without a guard of its main part ended `flotilla serve`, without a word and with status 0."""
    (tmp_path / "failing_at_import.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"the policy `failing_at_import.P` cannot be imported.*{message}"):
        make_policy(PolicyConfig(name="failing_at_import.P"))
