"""The demo target with its decoding heads as the only drafter: the same text, whatever happens."""

from __future__ import annotations

import pytest

from cluster.config import FlotillaConfig
from cluster.local import LocalEngine
from cluster.stream_messages import Submit
from engine.heads_config import UnsuitableHeads
from tests.cluster import lost_target
from tests.cluster.demo_requests import of_every_domain
from verifier.proposing import HeadProposer
from zoo.registry import HEADS, TARGET


def config(policy: str = "fixed", **changes: dict[str, object]) -> FlotillaConfig:
    raw: dict[str, dict[str, object]] = {
        "target": {"path": f"zoo:{TARGET}", "num_slots": 2048},
        "policy": {"name": policy, "fixed_depth": 3, "max_width": 3},
        "scheduler": {},
    }
    for part, values in changes.items():
        raw[part] = raw[part] | values
    return FlotillaConfig.model_validate({**raw, "drafters": [{"kind": "heads", "path": f"zoo:{HEADS}"}]})


@pytest.fixture(scope="module")
def requests() -> list[Submit]:
    return of_every_domain()


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    return LocalEngine(config())


@pytest.fixture(scope="module")
def expected(engine: LocalEngine, requests: list[Submit]) -> dict[str, list[int]]:
    """Every request by itself, one token per step."""
    engine.use_policy(config("autoregressive"))
    return {r.request_id: engine.generate([r])[r.request_id].tokens for r in requests}


@pytest.mark.parametrize("policy", ["fixed", "flotilla", "smartspec", "specserve", "adaserve"])
def test_text_is_that_of_plain_decoding(
    engine: LocalEngine, requests: list[Submit], expected: dict[str, list[int]], policy: str
) -> None:
    engine.use_policy(config(policy))
    completions = engine.generate(requests)
    assert {name: done.tokens for name, done in completions.items()} == expected
    if policy == "fixed":
        # Trained heads: a good share of the steps commits more than the token the target adds itself.
        assert engine.core.totals.accepted_tokens > 0.3 * engine.core.totals.iterations
        assert {"heads"} == set(engine.core.totals.accepted_by_drafter)


def test_text_survives_chunked_prefill_and_the_loss_of_all_keys_and_values(
    engine: LocalEngine, requests: list[Submit], expected: dict[str, list[int]]
) -> None:
    engine.use_policy(config(scheduler={"prefill_chunk": 16}))
    assert engine.target.heads is not None
    assert lost_target.generate(engine, requests, HeadProposer(engine.target.heads)) == expected
    assert engine.core.totals.preemptions > 3
    assert engine.core.totals.accepted_tokens > 0


def test_the_heads_are_scored_by_their_first_choices(engine: LocalEngine, requests: list[Submit]) -> None:
    engine.use_policy(config())
    pool, scores = engine.core.pool, []
    observe = pool.acceptance.observe

    def noting(request_id: str, kind: str, scored: int, agreed: int) -> None:
        scores.append((kind, scored, agreed))
        observe(request_id, kind, scored, agreed)

    pool.acceptance.observe = noting  # type: ignore[method-assign]
    engine.generate(requests)
    assert {kind for kind, _, _ in scores} == {"heads"}
    scored, agreed = (sum(score[i] for score in scores) for i in (1, 2))
    assert 0.2 * scored < agreed < 0.9 * scored


def test_the_target_runs_the_heads_a_drafter_names() -> None:
    assert config().target.heads == f"zoo:{HEADS}"
    with pytest.raises(ValueError, match="one set of heads, or one EAGLE layer, per target"):
        config(target={"heads": "elsewhere"})


def test_heads_of_another_target_are_refused() -> None:
    with pytest.raises(UnsuitableHeads, match="trained for target-8x384"):
        LocalEngine(config(target={"path": "zoo:drafter-general-2x192"}))
