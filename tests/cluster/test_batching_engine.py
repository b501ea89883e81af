"""Batching rules change when tokens come, and never which: on the demo family, in one process."""

from __future__ import annotations

import msgspec
import pytest

from cluster.batching.registry import BATCHING_RULES
from cluster.config import FlotillaConfig
from cluster.local import LocalEngine
from cluster.stream_messages import Objective, Submit
from engine.sampling_params import SamplingParams
from tests.cluster.small_family import small_family

OBJECTIVES = (Objective(), Objective(tpot_ms=4.0), Objective(tpot_ms=30.0, ttft_ms=200.0))


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    return LocalEngine(FlotillaConfig.model_validate(small_family()))


def requests() -> list[Submit]:
    made = []
    for number in range(6):
        sampling = SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=12)
        prompt = [(17 * number + 31 * i) % 4000 + 4 for i in range(5 + 13 * number)]
        made.append(Submit(request_id=f"r{number}", prompt=prompt, sampling=sampling))
    return made


def use(engine: LocalEngine, policy: str, **scheduler: object) -> None:
    raw = engine.config.model_dump() | {"policy": {"name": policy}, "scheduler": scheduler}
    engine.use_policy(FlotillaConfig.model_validate(raw))


@pytest.fixture(scope="module")
def expected(engine: LocalEngine) -> dict[str, list[int]]:
    """Every request by itself, one token per step."""
    use(engine, "autoregressive")
    return {r.request_id: engine.generate([r])[r.request_id].tokens for r in requests()}


@pytest.mark.parametrize("rule", sorted(BATCHING_RULES))
def test_every_rule_returns_what_plain_decoding_returns(
    engine: LocalEngine, expected: dict[str, list[int]], rule: str
) -> None:
    use(engine, "flotilla", batching=rule, prefill_chunk=32, max_running=4, micro_batches=2)
    wanted = [
        msgspec.structs.replace(r, objective=OBJECTIVES[n % 3], tier="ab"[n % 2])
        for n, r in enumerate(requests())
    ]
    completions = engine.generate(wanted)
    assert {request_id: c.tokens for request_id, c in completions.items()} == expected
