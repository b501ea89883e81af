"""The demo target with its EAGLE layer, alone and beside a model drafter: the same text, whatever happens."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from cluster.config import FlotillaConfig
from cluster.local import LocalEngine
from cluster.stream_messages import Submit
from cluster.target import profile_heads, profile_target
from engine.proposals import Proposals
from engine.stop_rules import StopRule
from tests.cluster import lost_target
from tests.cluster.demo_requests import of_every_domain
from tests.verifier.test_eagle_endings import depth_by_rule
from verifier.eagle_profile import measure_eagle_costs
from verifier.proposing import Asking
from verifier.verifier import Verifier
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


@pytest.fixture
def alone(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> LocalEngine:
    """Without a model drafter, and nothing is known of earlier requests."""
    monkeypatch.setattr(engine, "drafters", {"eagle": engine.drafters["eagle"]})
    engine.target.verifier = Verifier(engine.target.runner, proposer=engine.target.eagle)
    return engine


@pytest.fixture(scope="module")
def expected(engine: LocalEngine, requests: list[Submit]) -> dict[str, list[int]]:
    """Every request by itself, one token per step."""
    engine.use_policy(config("autoregressive", BOTH))
    return {r.request_id: engine.generate([r])[r.request_id].tokens for r in requests}


@pytest.mark.parametrize("policy", ["fixed", "flotilla", "smartspec", "specserve", "adaserve"])
def test_text_is_that_of_plain_decoding(
    alone: LocalEngine, requests: list[Submit], expected: dict[str, list[int]], policy: str
) -> None:
    alone.use_policy(config(policy))
    completions = alone.generate(requests)
    assert {name: done.tokens for name, done in completions.items()} == expected
    totals = alone.core.totals
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


@pytest.mark.parametrize("policy", ["specserve", "threshold"])
def test_no_layer_is_computed_that_the_policy_would_have_a_drafter_leave_out(
    alone: LocalEngine,
    requests: list[Submit],
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
) -> None:
    alone.use_policy(config(policy))
    least = math.log(alone.config.policy.confidence_threshold)
    assert alone.target.eagle is not None
    propose = alone.target.eagle.propose
    found: list[tuple[Sequence[Asking], StopRule | None, list[Proposals]]] = []

    def noted(asking: Sequence[Asking], rule: StopRule | None = None) -> Callable[[], list[Proposals]]:
        proposals = propose(asking, rule)()
        found.append((asking, rule, proposals))
        return lambda: proposals

    monkeypatch.setattr(alone.target.eagle, "propose", noted)
    assert {name: done.tokens for name, done in alone.generate(requests).items()} == expected
    ended = 0
    for asking, rule, proposals in found:
        if not asking or (rule is None and policy == "specserve"):
            continue
        deepest = max(len(one.token) for one in proposals)
        ended += deepest < max(one.num_heads or 0 for one in asking)
        chains = [one.logp[:, 0].astype(np.float64) for one in proposals]
        if rule is not None:
            beams = []
            for chain, one, asked in zip(chains, proposals, asking, strict=True):
                is_stop = np.isin(one.token[:, 0], asked.state.params.stop_token_ids)
                nodes = int(is_stop.argmax()) + 1 if is_stop.any() else len(chain)
                beams.append([[p] for p in np.exp(chain.cumsum())[:nodes].tolist()])
            assert depth_by_rule(rule, beams) == deepest
        else:
            # Who has not been planned for yet drafts on.
            assert all(one.stop_token_logp in (-math.inf, least) for one in asking)
            assert any(
                len(chain) == deepest and (chain[:-1] >= one.stop_token_logp).all()
                for chain, one in zip(chains, asking, strict=True)
            )
    assert ended > len(found) / 4


def test_what_drafting_and_reading_take_is_measured_apart(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = functools.partial(measure_eagle_costs, request_counts=(1, 32), contexts=(32,), repeats=2)
    monkeypatch.setattr("cluster.target.measure_eagle_costs", brief)
    per_layer = profile_heads(engine.target)
    one = min(point.seconds for point in per_layer if point.num_requests == 1)
    many = min(point.seconds for point in per_layer if point.num_requests == 32)
    assert 0 < one < many
    assert engine.target.eagle is not None
    reads = []
    monkeypatch.setattr(engine.target.eagle, "read", lambda found, is_asked: reads.append(len(found)))
    points = profile_target(engine.target, repeats=1).points
    assert len(reads) == 2 * len(points)
