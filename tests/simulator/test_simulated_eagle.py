"""EAGLE's layer beside a simulated target: the same texts, steps sent ahead, times of the profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cluster.linear_cost import LinearCost
from cluster.outstanding_verify import OutstandingVerify
from drafters.messages import DraftPlan
from engine.proposed_growth import grown
from simulator import hardware, systems
from simulator.acceptance import DraftQuality, load_fitted
from simulator.cli import app
from simulator.drafting import grow
from simulator.hardware import Trips
from simulator.proposing import EAGLE, EagleProfile, ProposingTarget, proposals_of
from simulator.run import Cell, Options, simulate
from simulator.scripts import Scripts
from tests.examples import examples
from tests.simulator.sim_requests import one_request, small_profile, some_requests
from tests.simulator.test_simulated_cell import plain, texts_of
from verifier.messages import VerifyCall, VerifyResult

QUALITY = DraftQuality(rate={"*": 0.75})
LAYER = EagleProfile(
    model="a layer",
    quality=QUALITY,
    cost=LinearCost(delta=3e-4),
    reading_s=4e-4,
    host_s=5e-4,
    host_request_s=1e-4,
)
AHEAD = systems.Bounds(async_scheduling=True)


@pytest.mark.parametrize("policy", ["flotilla", "adaserve", "smartspec", "specserve", "fixed-4"])
def test_texts_are_those_without_drafts(policy: str) -> None:
    for bounds in (systems.Bounds(), AHEAD):
        assert texts_of(f"{policy}/sarathi", bounds=bounds, drafters={}, eagle=LAYER) == plain()


def test_texts_survive_a_full_cache_beside_steps_sent_ahead() -> None:
    assert texts_of("flotilla", bounds=AHEAD, drafters={}, eagle=LAYER, num_slots=500) == plain()


def test_both_ends_grow_the_same_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(small_profile(drafters={}, eagle=LAYER), systems.parse("flotilla", AHEAD), Options())
    target = cell.target
    assert isinstance(target, ProposingTarget)
    step, planned, compared = target.step, dict[int, dict[str, int]](), 0
    grow_own = target._grown

    def noted(call: VerifyCall) -> VerifyResult:
        sizes = planned[call.call_id] = {}
        for item in call.verify:
            if item.plan is not None:
                sizes[item.request_id] = grow_own(item).num_nodes
        return step(call)

    verified = cell.core.learning.verified

    def watched(result: VerifyResult, sent: OutstandingVerify, *rest: Any) -> None:
        nonlocal compared
        for request_id, size in planned[result.call_id].items():
            request = cell.core.requests.get(request_id)
            if request is not None and sent.awaits(request):
                assert len(sent.trees[request_id]) == size
                compared += 1
        verified(result, sent, *rest)

    monkeypatch.setattr(target, "step", noted)
    monkeypatch.setattr(cell.core, "learning", SimpleNamespace(verified=watched))
    for number in range(12):
        cell.submit(one_request(number))
    cell.run()
    assert compared > 50


def test_the_target_waits_for_nobody() -> None:
    """One request: all of a step is its forward, what is drafted after it, and the target's own work."""
    trips = Trips(verify_s=2e-3)
    profile = small_profile(drafters={}, eagle=LAYER, trips=trips)
    request, options = one_request(0, 400), Options(jitter=0.0, max_width=1)
    bounds = replace(AHEAD, max_width=1, max_depth=6)
    ahead = simulate(profile, systems.parse("flotilla", bounds), [request], options)
    in_turn = simulate(
        profile, systems.parse("flotilla", replace(bounds, async_scheduling=False)), [request], options
    )
    target = LAYER.host_s + LAYER.host_request_s + LAYER.reading_s
    least_ms = 1e3 * (profile.cost.seconds(1, 1, 31) + target + LAYER.cost.delta)
    most_ms = 1e3 * (profile.cost.seconds(1, 7, 500) + target + 6 * LAYER.cost.delta)
    assert least_ms < ahead.steps.step_ms < most_ms
    assert in_turn.steps.step_ms > ahead.steps.step_ms + 0.8e3 * trips.verify_s
    assert ahead.all.accepted_per_step is not None
    assert ahead.all.accepted_per_step > 2.0


def test_what_steps_with_drafts_take_is_learnt_of_them() -> None:
    """Their drafts, which are there at once, kept them from being known as such: nothing was learnt."""
    trips = Trips(verify_s=2e-3, verify_request_s=1e-3, plain_request_s=0.0)
    profile = small_profile(drafters={}, eagle=LAYER, trips=trips)
    options = Options(jitter=0.0)
    cell = Cell(profile, systems.parse("fixed-2", replace(AHEAD, async_scheduling=False)), options)
    for number in range(8):
        cell.submit(one_request(number, 200))
    cell.run()
    true_s = trips.call_s(8, drafted=True) + LAYER.host_s + 8 * LAYER.host_request_s
    assert cell.core.planner.overhead.drafted_s(8) == pytest.approx(true_s, rel=0.1)


def test_a_seed_fixes_the_run() -> None:
    profile, requests = small_profile(drafters={}, eagle=LAYER), some_requests(count=16)
    runs = [simulate(profile, systems.parse("flotilla", AHEAD), requests) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0].num_unfinished == 0


@examples(60)
@given(seed=st.integers(0, 1000), depth=st.integers(1, 6), width=st.integers(1, 4))
def test_a_tree_grows_again_from_what_is_proposed_of_it(seed: int, depth: int, width: int) -> None:
    scripts = Scripts(load_fitted()["chat"])
    table = scripts.table(EAGLE, QUALITY, 4)
    script = scripts.add("a", "chat", seed, 10, 40)
    plan = DraftPlan(depth=depth, width=width)
    roots = np.array([scripts.row(script, table) + seed % 30])
    (tree,), _ = grow(table, roots, np.zeros(1, dtype=np.int64), [plan])
    again = grown(0, plan, frozenset(), proposals_of(tree, width, 10, 0.0))
    assert again.token.tolist() == tree.token.tolist()
    assert again.parent.tolist() == tree.parent.tolist()
    np.testing.assert_allclose(again.logp, tree.logp, atol=1e-4)


def test_a_log_of_drafters_says_nothing_of_eagle(tmp_path: Path) -> None:
    assert hardware.load("llama-8b-h200-eagle").eagle is not None
    log = tmp_path / "log.npz"
    log.write_bytes(b"")
    asked = ["--profile", "llama-8b-h200-eagle", "--acceptance", str(log), "--policy", "flotilla"]
    ran = CliRunner().invoke(app, asked)
    assert ran.exit_code == 2
    assert "EAGLE" in ran.output


def test_the_list_of_profiles_names_the_layer() -> None:
    """It said "with  on 1x H200"."""
    listed = " ".join(CliRunner().invoke(app, ["--list"]).output.split())
    assert "tensor parallel 1 with an EAGLE-3 layer grown to the shape on 1x H200" in listed
    assert "with on" not in listed
