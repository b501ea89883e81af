"""The replay of drafter choices, on scores made up so that the right choice is known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.drafter_choice import GlobalMeanRule, PoolRule, goodputs, replay
from benchmarks.drafter_scores import DrafterScores, ScoredPrompt
from cluster.cost_model import CostProfile
from cluster.linear_cost import LinearCost
from drafters.protocol import Capabilities

RATES = {"a": {"first": 0.9, "second": 0.7}, "b": {"first": 0.7, "second": 0.9}}


@pytest.fixture(scope="module")
def scores() -> DrafterScores:
    rng = np.random.default_rng(0)
    prompts = []
    for number in range(120):
        domain = ("first", "second")[number % 2]
        head = [10, 11, 12, 13, 14] if domain == "first" else [20, 21, 22, 23, 24]
        prompts.append(
            ScoredPrompt(
                domain=domain,
                prompt=[*head, *rng.integers(100, 2000, 25).tolist()],
                answer=[1] * 60,
                scored=dict.fromkeys(RATES, 60),
                agreed={name: int(rng.binomial(60, rates[domain])) for name, rates in RATES.items()},
            )
        )
    model = Capabilities(
        kind="model",
        max_depth=8,
        max_width=1,
        has_probabilities=True,
        needs_prefill=True,
        vocab_size=4000,
        max_tokens=500,
    )
    cost = LinearCost(gamma=1e-5, delta=3e-4)
    profile = CostProfile(
        target=LinearCost(gamma=2e-4, delta=4e-3), drafters=dict.fromkeys(RATES, cost), overhead_s=1e-3
    )
    return DrafterScores(prompts=prompts, drafters=dict.fromkeys(RATES, model), profile=profile)


def test_each_kind_of_prompt_gets_its_drafter_and_the_global_mean_cannot(scores: DrafterScores) -> None:
    stages = replay(scores, {"mean": GlobalMeanRule, "prior": PoolRule}, orders=3)
    last = {stage.rule: stage for stage in stages if stage.last == 120}
    assert min(last["prior"].suited.values()) > 0.9
    assert min(last["mean"].suited.values()) < 0.6
    assert last["prior"].regret < last["mean"].regret
    assert last["prior"].regret_to_domain < 0.02


def test_goodput_follows_the_rates(scores: DrafterScores) -> None:
    table = goodputs(scores)
    assert table.shape == (120, 2)
    better = [prompt.rate("a") > prompt.rate("b") for prompt in scores.prompts]
    assert ((table[:, 0] > table[:, 1]) == better).all()
