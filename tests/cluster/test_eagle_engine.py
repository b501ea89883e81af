"""The demo target with its EAGLE layer, alone and beside a model drafter: the same text, whatever happens."""

from __future__ import annotations

import pytest

from cluster.config import FlotillaConfig
from cluster.local import LocalEngine
from cluster.stream_messages import Submit
from cluster.target import profile_heads, profile_target
from tests.cluster import lost_target
from tests.cluster.demo_requests import of_every_domain
from zoo.registry import EAGLE, TARGET

EAGLE_ALONE = ({"kind": "eagle", "path": f"zoo:{EAGLE}"},)
BOTH = (
    *EAGLE_ALONE,
    {"kind": "model", "name": "general", "path": "zoo:drafter-general-2x192", "num_slots": 4096},
)


def config(
    policy: str = "fixed", drafters: tuple[dict[str, object], ...] = EAGLE_ALONE, **changes: dict[str, object]
) -> FlotillaConfig:
    raw: dict[str, dict[str, object]] = {
        "target": {"path": f"zoo:{TARGET}", "num_slots": 2048},
        "policy": {"name": policy, "fixed_depth": 4, "max_width": 3},
        "scheduler": {},
    }
    for part, values in changes.items():
        raw[part] = raw.get(part, {}) | values
    return FlotillaConfig.model_validate({**raw, "drafters": list(drafters)})


@pytest.fixture(scope="module")
def requests() -> list[Submit]:
    return of_every_domain()


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    return LocalEngine(config(drafters=BOTH))


@pytest.fixture(scope="module")
def expected(engine: LocalEngine, requests: list[Submit]) -> dict[str, list[int]]:
    """Every request by itself, one token per step."""
    engine.use_policy(config("autoregressive", BOTH))
    return {r.request_id: engine.generate([r])[r.request_id].tokens for r in requests}


@pytest.mark.parametrize("policy", ["fixed", "flotilla", "smartspec", "specserve", "adaserve"])
def test_text_is_that_of_plain_decoding(
    requests: list[Submit], expected: dict[str, list[int]], policy: str
) -> None:
    engine = LocalEngine(config(policy))
    completions = engine.generate(requests)
    assert {name: done.tokens for name, done in completions.items()} == expected
    totals = engine.core.totals
    assert set(totals.accepted_by_drafter) <= {"eagle"}
    if policy == "fixed":
        # Of four tokens drafted one after the other a good share is the target's own.
        assert totals.accepted_tokens > 0.45 * totals.committed_tokens


def test_requests_move_between_eagle_and_a_model(
    engine: LocalEngine, requests: list[Submit], expected: dict[str, list[int]]
) -> None:
    """Every two steps each request draws another drafter."""
    selector = {"name": "lbss", "alpha": 100_000, "beta": 2}
    engine.use_policy(config("adaserve", BOTH, selector=selector))
    completions = engine.generate(requests)
    assert {name: done.tokens for name, done in completions.items()} == expected
    accepted = engine.core.totals.accepted_by_drafter
    assert min(accepted["eagle"], accepted["general"]) > 10


def test_text_survives_chunked_prefill_and_the_loss_of_all_keys_and_values(
    engine: LocalEngine, requests: list[Submit], expected: dict[str, list[int]]
) -> None:
    engine.use_policy(config("adaserve", BOTH, scheduler={"prefill_chunk": 16}))
    assert engine.target.eagle is not None
    assert lost_target.generate(engine, requests, engine.target.eagle) == expected
    assert engine.core.totals.preemptions > 3
    assert engine.core.totals.accepted_tokens > 0


def test_what_drafting_and_reading_take_is_measured_apart(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    per_layer = profile_heads(engine.target)
    one = min(point.seconds for point in per_layer if point.num_requests == 1)
    many = min(point.seconds for point in per_layer if point.num_requests == 32)
    assert 0 < one < many
    assert engine.target.eagle is not None
    reads = []
    monkeypatch.setattr(engine.target.eagle, "read", lambda found, is_asked: reads.append(len(found)))
    points = profile_target(engine.target, repeats=1)
    assert len(reads) == 2 * len(points)
