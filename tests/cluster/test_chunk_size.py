"""How many prompt tokens a step takes, by machine."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.batching.batcher import Batcher
from cluster.chunk_size import CHUNK_MULTIPLE, LEAST_CHUNK, MOST_CHUNK, chunk_tokens
from cluster.config import SchedulerConfig, SelectorConfig
from cluster.cost_model import DEFAULT_PROFILE, CostModel, CostProfile
from cluster.drafter_pool import DrafterPool
from cluster.linear_cost import LinearCost
from simulator import hardware


@pytest.mark.parametrize(
    ("profile", "tokens"),
    [
        ("demo-2-cores", 128),
        ("llama-8b-h200-measured", 1024),
        ("qwen-32b-h200-measured", 1024),
        ("llama-70b-fp8-h200-measured", 512),
    ],
)
def test_a_machine_whose_tokens_are_cheap_reads_more_of_a_prompt_in_a_step(profile: str, tokens: int) -> None:
    assert chunk_tokens(SchedulerConfig(), hardware.load(profile).cost) == tokens


def test_what_is_configured_is_what_is_taken() -> None:
    cost = hardware.load("llama-8b-h200-measured").cost
    assert chunk_tokens(SchedulerConfig(prefill_chunk=96), cost) == 96
    with pytest.raises(ValidationError, match="prefill_chunk"):
        SchedulerConfig.model_validate({"prefill_chunk": "most"})


@given(
    gamma=st.floats(0.0, 1e-2),
    gamma_knee=st.floats(0.0, 1e-2),
    delta=st.floats(0.0, 10.0),
    knee=st.floats(0.0, 4096.0),
)
def test_any_profile_has_a_bounded_power_of_two(
    gamma: float, gamma_knee: float, delta: float, knee: float
) -> None:
    cost = LinearCost(gamma=gamma, gamma_knee=gamma_knee, delta=delta, knee_tokens=knee)
    tokens = chunk_tokens(SchedulerConfig(), cost)
    assert LEAST_CHUNK <= tokens <= MOST_CHUNK
    assert tokens.bit_count() == 1
    if LEAST_CHUNK < tokens < MOST_CHUNK:  # within half a power of what it aims at
        wanted = CHUNK_MULTIPLE * cost.seconds(1, 1, 0) / cost.token_seconds()
        assert abs(math.log2(tokens / wanted)) <= 0.5 + 1e-9


def test_rules_are_told_what_was_chosen() -> None:
    cost = CostModel(CostProfile(target=hardware.load("llama-8b-h200-measured").cost))
    for config, tokens in ((SchedulerConfig(), 1024), (SchedulerConfig(prefill_chunk=64), 64)):
        batcher = Batcher(config, cost, DrafterPool(cost, 8, SelectorConfig()))
        assert batcher.context(0.0, 100, 0.01).chunk_tokens == tokens
    batcher = Batcher(SchedulerConfig(), CostModel(DEFAULT_PROFILE), DrafterPool(cost, 8, SelectorConfig()))
    assert batcher.context(0.0, 100, 0.01).chunk_tokens == 128
