"""Real models, every request moved to another drafter every three steps: no token differs."""

from __future__ import annotations

import pytest

from cluster.config import FlotillaConfig
from cluster.local import LocalEngine
from cluster.stream_messages import Submit
from engine.sampling_params import SamplingParams
from tests.cluster.rotating import Rotate
from tests.cluster.small_family import small_family
from tests.cluster.test_local_engine import NUM_REQUESTS, requests


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    return LocalEngine(FlotillaConfig.model_validate(small_family()))


def use(engine: LocalEngine, policy: str, selector: dict[str, object]) -> None:
    raw = engine.config.model_dump()
    raw |= {"policy": {"name": policy}, "selector": selector, "scheduler": {"draft_ahead": 1}}
    engine.use_policy(FlotillaConfig.model_validate(raw))


def longer() -> list[Submit]:
    """Greedy, sampled and penalised requests, long enough to visit all drafters."""
    made = []
    for submit in requests():
        fields = {name: getattr(submit.sampling, name) for name in submit.sampling.__struct_fields__}
        fields["max_tokens"] = 32
        made.append(
            Submit(request_id=submit.request_id, prompt=submit.prompt, sampling=SamplingParams(**fields))
        )
    return made


@pytest.fixture(scope="module")
def expected(engine: LocalEngine) -> list[list[int]]:
    """Every request by itself, one token per step."""
    use(engine, "autoregressive", {})
    return [engine.generate([submit])[submit.request_id].tokens for submit in longer()]


@pytest.mark.parametrize("policy", ["fixed", "adaserve"])
def test_moving_every_three_steps_changes_no_token(
    engine: LocalEngine, expected: list[list[int]], policy: str
) -> None:
    use(engine, policy, {})
    engine.core.pool.selector = Rotate(every=3)
    completions = engine.generate(longer())
    assert [completions[f"r{n}"].tokens for n in range(NUM_REQUESTS)] == expected
    totals = engine.core.pool.switching.totals
    assert totals.switches > 5 * NUM_REQUESTS
    assert totals.prepared > 0
    assert set(engine.core.totals.verified_by_drafter) == set(engine.drafters)


@pytest.mark.thorough
def test_exploring_in_chunks_of_three_steps_changes_no_token(
    engine: LocalEngine, expected: list[list[int]]
) -> None:
    use(engine, "adaserve", {"name": "lbss", "alpha": 3000, "beta": 3})
    completions = engine.generate(longer())
    assert [completions[f"r{n}"].tokens for n in range(NUM_REQUESTS)] == expected
    assert engine.core.pool.switching.totals.switches > 2 * NUM_REQUESTS
