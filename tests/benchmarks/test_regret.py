"""The bandit of `flotilla bench regret`: its expectations, its accounts, and the fits made on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import regret
from benchmarks.regret_bandit import LAYER_S, NUM_REQUESTS, draw, shifted
from benchmarks.regret_run import Losses, Simulation
from selector.assignment import match
from selector.protocol import Outcome, PoolView, RequestView
from selector.registry import make_selector


class Oracle:
    """Knows the best matching; tells nobody, and learns nothing."""

    def __init__(self, columns: list[int]) -> None:
        self.columns = columns
        self.outcomes: list[Outcome] = []

    def begin(self, request_id: str, prompt: list[int], labels: tuple[str, ...] = ()) -> None: ...

    def assign(self, requests: list[RequestView], pool: PoolView) -> dict[str, str]:
        return {view.request_id: f"d{self.columns[i]}" for i, view in enumerate(requests)}

    def observe(self, outcomes: list[Outcome]) -> None:
        self.outcomes += outcomes

    def score(self, request_id: str, kind: str, scored: int, agreed: int) -> None: ...


def test_the_best_matching_has_no_regret_and_brings_what_it_promises() -> None:
    bandit = draw(np.random.default_rng(3))
    columns = match(bandit.goodput, bandit.capacities, bandit.none).columns.tolist()
    oracle: Any = Oracle(columns)
    losses = Simulation(oracle, [bandit], 6000, 0).run()
    assert losses.goodput == pytest.approx(np.zeros(6000), abs=1e-9)
    for i in range(NUM_REQUESTS):
        mine = [outcome for outcome in oracle.outcomes if outcome.request_id == f"r{i}"]
        goodput = sum(one.num_tokens for one in mine) / sum(one.seconds for one in mine)
        assert goodput == pytest.approx(bandit.goodput[i, columns[i]], rel=0.04)


def test_a_shift_changes_who_is_best() -> None:
    rng = np.random.default_rng(0)
    before = draw(rng)
    after = shifted(before, rng)
    best = [match(one.goodput, one.capacities, one.none).columns for one in (before, after)]
    assert (best[0] != best[1]).sum() >= 2


@pytest.mark.parametrize("name", ["fixed", "greedy-length"])
def test_what_never_moves_need_not_be_asked(name: str) -> None:
    rng = np.random.default_rng(1)
    before = draw(rng)
    phases = [before, shifted(before, rng)]
    asked, assumed = (
        Simulation(make_selector(name), phases, 6000, 0, is_static=is_static).run()
        for is_static in (False, True)
    )
    assert np.array_equal(asked.goodput, assumed.goodput)


def test_ours_loses_less_than_a_bandit_and_follows_a_shift() -> None:
    rng = np.random.default_rng(2)
    before = draw(rng)
    phases = [before, shifted(before, rng)]
    ours, lbss = (
        Simulation(make_selector(name, alpha=128, beta=8), phases, 4096, 0).run()
        for name in ("flotilla", "lbss")
    )
    for half in (slice(0, 2048), slice(2048, 4096)):
        assert ours.goodput[half].sum() < 0.25 * lbss.goodput[half].sum()
    assert ours.goodput[-256:].mean() < 0.02 * phases[1].optimum * phases[1].slot_s


def test_growth_is_told_from_a_line_and_a_logarithm() -> None:
    slots = np.array(regret._grid(1 << 17))
    assert regret._exponent(slots, 3.0 * slots) == pytest.approx(1.0)
    options = regret.RegretOptions()
    ends = regret._epoch_ends(options)
    assert ends[:3] == [130, 262, 398]
    # 100 tokens in each doubling.
    lost = 100.0 * np.diff(np.log2(np.arange(1, options.num_slots + 2)))
    found = regret._growth([(Losses(lost, lost, lost), 1.0)], ends)
    assert found["regret"]["tokens_per_doubling"] == pytest.approx(100.0, rel=0.01)
    assert found["regret"]["exponent"] < 0.15
    assert found["regret_with_switching"]["mean"][-1] == pytest.approx(2 * found["regret"]["mean"][-1])


def test_a_drafter_whose_drafts_outlast_the_slot_reads_while_the_target_verifies() -> None:
    """In this instance the largest drafter's drafts do: nobody but who has it would ever learn of it."""
    bandit = draw(np.random.default_rng(9))
    assert bandit.depth[2, 3] * LAYER_S[3] > bandit.slot_s
    losses = Simulation(make_selector("flotilla"), [bandit], 4096, 9).run()
    assert losses.goodput[-256:].sum() == pytest.approx(0.0)
