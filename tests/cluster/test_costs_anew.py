"""Other weights under a drafter's name: their costs are those measured, without corrections of the old."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.cell_metrics import CellMetrics
from cluster.config import FlotillaConfig
from cluster.cost_model import CostModel, CostProfile
from cluster.linear_cost import LinearCost
from cluster.scheduler_shell import SchedulerShell
from selector.acceptance import INITIAL_RATE
from selector.lbss import Lbss
from selector.protocol import BeginsAnew, Outcome
from selector.registry import SELECTORS, make_selector
from tests.selector.selector_world import World, drafter

OLD, NEW = LinearCost(delta=1e-3), LinearCost(delta=4e-3, gamma=1e-4)


def make_shell(selector: str = "flotilla") -> SchedulerShell:
    """Its drafter's layers have long taken five times what the profile says, and each call 20 ms besides."""
    config = FlotillaConfig.model_validate(
        {"target": {"path": "unused"}, "policy": {"name": "smartspec"}, "selector": {"name": selector}}
    )
    shell = SchedulerShell(config, CellMetrics(), lambda name: None, lambda name: None)
    profile = CostProfile(target=LinearCost(gamma=1e-4, delta=1e-2), drafters={"small": OLD, "other": OLD})
    shell.restart(config, CostModel(profile))
    cost, costs = shell.core.cost, shell.core.pool.costs
    for step in range(300):
        for name in ("small", "other"):
            layers_s = cost.layers_seconds(name, 1, 1, 1 + step % 4)
            cost.observe_draft(name, layers_s, 5 * layers_s + 0.02)
    costs.keeping |= {"small", "other"}
    costs.have_read("small", 100, 1.0)
    return shell


def test_what_corrected_the_old_weights_costs_does_not_correct_the_new_ones() -> None:
    shell = make_shell()
    cost, costs = shell.core.cost, shell.core.pool.costs
    others = [cost.draft_seconds("other", 2, 1, depth) for depth in range(5)]
    assert cost.draft_seconds("small", 1, 1, 4) == pytest.approx(0.04, rel=0.1)
    shell.learn_cost("small", NEW)
    for depth in range(1, 5):
        expected = NEW.seconds(2, 4, 0) + (depth - 1) * NEW.seconds(2, 2, 0)
        assert cost.draft_seconds("small", 2, 1, depth) == pytest.approx(expected)
    assert cost.draft_layer_seconds("small", 2, 1) == pytest.approx(NEW.seconds(2, 2, 0))
    assert costs.rebuild_s("small", 10) == pytest.approx(NEW.seconds(1, 10, 10))
    assert [cost.draft_seconds("other", 2, 1, depth) for depth in range(5)] == others


def test_the_new_weights_are_corrected_by_their_own_calls_alone() -> None:
    cost = make_shell().core.cost
    cost.learn("small", NEW)
    fresh = CostModel(CostProfile(target=cost.profile.target, drafters={"small": NEW}))
    for model in (cost, fresh):
        for step in range(30):
            layers_s = model.layers_seconds("small", 1, 1, 1 + step % 4)
            model.observe_draft("small", layers_s, 2 * layers_s)
    for depth in (1, 4):
        expected = fresh.draft_seconds("small", 1, 1, depth)
        assert cost.draft_seconds("small", 1, 1, depth) == pytest.approx(expected)


def test_how_often_the_old_weights_were_right_says_nothing_of_the_new_ones() -> None:
    """Weights that replaced bad ones would hardly be tried, and what they draft not be verified."""
    shell = make_shell()
    core, said = shell.core, np.full(4000, 0.9)
    rates, calibration = core.pool.acceptance, core.planner.calibration
    for number in range(200):
        rates.begin(f"r{number}", [1] * 20)
        for name in ("small", "other"):
            rates.observe(f"r{number}", name, 40, 2)
        if number < 190:
            rates.forget(f"r{number}")
    for name in ("small", "other"):
        calibration.of(name).observe(said, np.zeros(4000, dtype=np.bool_))
    shell.learn_cost("small", NEW)
    rates.begin("new", [1] * 20)
    for request_id in ("new", "r199"):
        rate, spread = rates.posterior(request_id, "small")
        assert rate + 2.0 * spread > 0.5
        assert sum(rates.posterior(request_id, "other")) < 0.3
    assert calibration.of("small").apply(said)[0] > 0.8 > 0.1 > calibration.of("other").apply(said)[0]
    for number in range(190, 200):
        rates.forget(f"r{number}")  # what they taught of the old weights is not taken off the new ones
    assert rates.prior("new", "small")[0] == INITIAL_RATE


def test_what_the_old_weights_brought_is_no_goodput_of_the_new_ones() -> None:
    """A bandit's means have all that ever was: of many requests, new ones would not move them for as long."""
    shell = make_shell("lbss")
    selector = shell.core.pool.selector
    assert isinstance(selector, Lbss)
    made = World(selector)
    made.add(drafter("small", capacity=9), drafter("other", capacity=9))
    for number in range(8):
        made.arrive(f"r{number}")
    for _ in range(16):  # of exploration
        selector.observe([Outcome(name, place, 40, 1, 1.0) for name, place in made.step().items()])
    shell.learn_cost("small", NEW)
    for request_id in ("r0", "new"):
        assert (selector.estimate(request_id, "small"), selector.estimate(request_id, "other")) == (0.0, 40.0)


@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_a_selector_that_learns_from_steps_can_begin_anew(name: str) -> None:
    selector = make_selector(name)
    assert isinstance(selector, BeginsAnew) == selector.learns_from_steps
