"""What a user's policy or selector may do wrong: told in one sentence, and no request is lost for it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.config import PolicyConfig, SelectorConfig
from cluster.policies.base import Policy, Rests, StopsDrafting
from cluster.policies.registry import make_policy
from deployments.cli import app
from deployments.demo import demo_config
from deployments.preflight import StartError, check
from drafters.messages import DraftPlan
from engine.own_classes import OwnClassError
from engine.tree import TokenTree
from tests.cluster.policies.batches import context, request
from tests.cluster.simulated import submit
from tests.cluster.test_core import World

POLICIES = """
import numpy as np
from drafters.messages import DraftPlan

class Whole:
    def __init__(self, config): pass
    def plan(self, batch, context): return [DraftPlan(depth=2) for _ in batch]
    def select(self, batch, trees, context): return [np.arange(len(tree), dtype=np.int32) for tree in trees]

class NoConfig(Whole):
    def __init__(self): pass
class NoSelect:
    def __init__(self, config): pass
    def plan(self, batch, context): return []
class OneArgument(Whole):
    def plan(self, batch): return []
class Raises(Whole):
    def plan(self, batch, context): return {}["nothing"]
class PlansNothing(Whole):
    def plan(self, batch, context): return None
class PlansTooFew(Whole):
    def plan(self, batch, context): return []
class PlansNumbers(Whole):
    def plan(self, batch, context): return [3 for _ in batch]
class PlansHalves(Whole):
    def plan(self, batch, context): return [DraftPlan(depth=2.5) for _ in batch]
class PlansNan(Whole):
    def plan(self, batch, context): return [DraftPlan(depth=2, stop_logp=float("nan")) for _ in batch]
class PlansHuge(Whole):
    def plan(self, batch, context): return [DraftPlan(depth=np.int64(900), width=900) for _ in batch]
class PlansNegative(Whole):
    def plan(self, batch, context): return [DraftPlan(depth=-1, width=-1) for _ in batch]
class Clears(Whole):
    def plan(self, batch, context):
        plans = super().plan(batch, context)
        batch.clear()
        return plans
class Rests(Whole):
    def rests(self, num_requests): return True
class Rules(Whole):
    def stop_rule(self, drafter, num_drafting, batch, context): return 0.5
class SelectsTooFew(Whole):
    def select(self, batch, trees, context): return []
class SelectsNoRoot(Whole):
    def select(self, batch, trees, context): return [np.arange(1, len(tree)) for tree in trees]
class SelectsBeyond(Whole):
    def select(self, batch, trees, context): return [np.arange(len(tree) + 1) for tree in trees]
class SelectsOrphans(Whole):
    def select(self, batch, trees, context): return [np.array([0, len(tree) - 1]) for tree in trees]
class SelectsTwice(Whole):
    def select(self, batch, trees, context): return [np.array([0, 1, 1]) for tree in trees]
class SelectsMask(Whole):
    def select(self, batch, trees, context): return [np.ones(len(tree), dtype=bool) for tree in trees]
class Writes(Whole):
    def select(self, batch, trees, context):
        trees[0].token[:] = 5
        return super().select(batch, trees, context)
"""

SELECTORS = """
from selector.fixed import Fixed

class Whole(Fixed):
    def __init__(self, estimates): super().__init__()
class NoMethods:
    def __init__(self, estimates): pass
class Raises(Whole):
    def assign(self, requests, pool): raise RuntimeError("boom")
class Unknown(Whole):
    def assign(self, requests, pool): return {request.request_id: "nobody" for request in requests}
class Lists(Whole):
    def assign(self, requests, pool): return list(pool.drafters)
class Forgets(Whole):
    def forget(self, request_id): raise KeyError(request_id)
class Observes(Whole):
    learns_from_steps = True
    def observe(self, outcomes): return outcomes[0].nothing
"""

TREE = TokenTree(
    token=np.array([7, 8, 9], dtype=np.int32),
    parent=np.array([-1, 0, 1], dtype=np.int32),
    logp=np.zeros(3, dtype=np.float32),
    depth=np.array([0, 1, 2], dtype=np.int32),
)

IN_PLAN = [
    ("OneArgument", r"failed in `plan`: TypeError"),
    ("Raises", r"failed in `plan` at .*own_policies.py:\d+: KeyError: 'nothing'"),
    ("PlansNothing", "`plan` answered None, and not a list"),
    ("PlansTooFew", "`plan` answered 0 entries for 1 requests"),
    ("PlansNumbers", "`plan` answered 3 for a request, and not a DraftPlan"),
    ("PlansHalves", "depth and width must be whole numbers"),
    ("PlansNan", "is no number"),
]
IN_SELECT = [
    ("SelectsTooFew", "`select` answered 0 entries for 1 requests"),
    ("SelectsNoRoot", "the first must be 0, the root"),
    ("SelectsBeyond", "there is no such node"),
    ("SelectsOrphans", "it lacks the parent of one of them"),
    ("SelectsTwice", "ascending, each once"),
    ("SelectsMask", "np.flatnonzero"),
    ("Writes", r"failed in `select` at .*own_policies.py:\d+: ValueError: .*read-only"),
]


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules above can be imported."""
    (tmp_path / "own_policies.py").write_text(POLICIES)
    (tmp_path / "own_selectors.py").write_text(SELECTORS)
    monkeypatch.syspath_prepend(tmp_path)


def make(name: str, *, goes_on: bool = False) -> Policy:
    return make_policy(PolicyConfig(name=f"own_policies.{name}"), goes_on=goes_on)


@pytest.mark.parametrize(
    ("name", "message"),
    [("NoConfig", "failed in its constructor: TypeError"), ("NoSelect", "no method `select`")],
)
def test_one_that_cannot_be_made_is_named(name: str, message: str) -> None:
    with pytest.raises(OwnClassError, match=f"the policy `own_policies.{name}` .*{message}"):
        make(name)


@pytest.mark.parametrize(("name", "message"), IN_PLAN)
def test_plans_that_make_no_sense_are_named(name: str, message: str) -> None:
    with pytest.raises(OwnClassError, match=f"the policy `own_policies.{name}`.*{message}"):
        make(name).plan([request()], context())


@pytest.mark.parametrize(("name", "message"), IN_SELECT)
def test_nodes_that_make_no_tree_are_named(name: str, message: str) -> None:
    with pytest.raises(OwnClassError, match=f"the policy `own_policies.{name}`.*{message}"):
        make(name).select([request()], [TREE], context())


def test_other_methods_are_named() -> None:
    resting, stopping = make("Rests"), make("Rules")
    assert isinstance(resting, Rests)
    assert isinstance(stopping, StopsDrafting)
    with pytest.raises(OwnClassError, match=r"`own_policies\.Rests` failed in `rests`: TypeError"):
        resting.rests(1, 0)
    with pytest.raises(OwnClassError, match=r"`stop_rule` answered 0\.5, which is no stop rule"):
        stopping.stop_rule("good", 1, [request()], context())


@pytest.mark.parametrize(
    ("name", "plan"), [("PlansHuge", DraftPlan(depth=5, width=2)), ("PlansNegative", DraftPlan(depth=0))]
)
def test_shapes_are_held_within_what_a_request_may_draft(name: str, plan: DraftPlan) -> None:
    assert make(name).plan([request(max_draft=5, max_width=2)], context()) == [plan]


def test_what_it_does_to_its_lists_is_its_own_matter() -> None:
    batch = [request()]
    assert make("Clears").plan(batch, context()) == [DraftPlan(depth=2)]
    assert len(batch) == 1


@pytest.mark.parametrize("name", [name for name, _ in [*IN_PLAN, *IN_SELECT]] + ["Rests", "Rules", "Clears"])
def test_a_cell_serves_on_without_drafts(name: str, caplog: pytest.LogCaptureFixture) -> None:
    world = World(3, f"own_policies.{name}")
    for number in range(6):
        world.send(submit(number, world.rng))
    world.drain()
    world.check_ends()
    told = [line for line in caplog.records if line.levelno == logging.ERROR]
    assert bool(told) == (name != "Clears")
    assert all(f"the policy `own_policies.{name}`" in line.getMessage() for line in told)
    assert len(told) < 12


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", r"failed in `assign` at .*own_selectors.py:\d+: RuntimeError: boom"),
        ("Unknown", "`assign` named the drafter 'nobody'; there are: good, poor"),
        ("Lists", "`assign` answered list"),
        ("Forgets", "failed in `forget`"),
        ("Observes", "failed in `observe`"),
    ],
)
def test_a_cell_serves_on_whatever_its_selector_does(
    name: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(3, "fixed", selector=f"own_selectors.{name}")
    for number in range(6):
        world.send(submit(number, world.rng))
    world.drain()
    world.check_ends()
    assert caplog.records
    assert caplog.records[0].getMessage().startswith(f"the selector `own_selectors.{name}`")
    with pytest.raises(ValueError, match=message):
        raise ValueError(caplog.records[0].getMessage())


def test_a_simulation_ends_and_a_cell_does_not_start() -> None:
    ended = CliRunner().invoke(
        app, ["simulate", "--policy", "own_policies.Raises", "--rate", "2", "--seconds", "1"]
    )
    assert ended.exit_code == 2
    assert "flotilla: the policy `own_policies.Raises` failed in `plan`" in ended.output
    policy, selector = (
        PolicyConfig(name="own_policies.NoConfig"),
        SelectorConfig(name="own_selectors.NoMethods"),
    )
    with pytest.raises(StartError, match="failed in its constructor"):
        check(demo_config().model_copy(update={"policy": policy}), listens=False)
    with pytest.raises(StartError, match="has no method `begin`"):
        check(demo_config().model_copy(update={"selector": selector}), listens=False)


def test_a_simulation_ends_with_what_its_selector_does() -> None:
    """A cell serves on, but nobody is to take that for a measurement of the selector."""
    profile = ["--profile", "demo-2-cores", "--rate", "2", "--seconds", "1"]
    ended = CliRunner().invoke(app, ["simulate", "--selector", "own_selectors.Raises", *profile])
    assert ended.exit_code == 2
    assert "flotilla: the selector `own_selectors.Raises` failed in `assign`" in ended.output


@pytest.mark.parametrize("form", [["--detailed", "--processes", "1"], ["--detailed"], ["--processes", "1"]])
def test_a_simulated_fleet_ends_with_a_sentence(tmp_path: Path, form: list[str]) -> None:
    """It ended with a traceback, and from several processes with `Aborted.` alone."""
    fleet = {"name": "own", "system": "own_policies.Raises", "cells": {"min": 2, "max": 2}}
    (tmp_path / "own.json").write_text(json.dumps({**fleet, "arrivals": {"rate": 8.0, "seconds": 1.0}}))
    ended = CliRunner().invoke(app, ["simulate", "fleet", str(tmp_path / "own.json"), *form])
    assert ended.exit_code == 2, ended.output
    assert "flotilla: the policy `own_policies.Raises` failed in `plan`" in ended.output


def test_a_selector_without_its_methods_is_refused() -> None:
    with pytest.raises(OwnClassError, match=r"the selector `own_selectors\.NoMethods` has no method `begin`"):
        World(3, "fixed", selector="own_selectors.NoMethods")
