"""Stop rules on their way from the policy to real drafters and back, in one process."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from cluster.config import FlotillaConfig
from cluster.local import LocalEngine
from cluster.stream_messages import Submit
from drafters.messages import DraftCall, DraftResult
from drafters.protocol import Capabilities, Drafter
from engine.sampling_params import SamplingParams
from engine.stop_rules import AdaptiveDrafter
from tests.cluster.small_family import small_family

NUM_REQUESTS = 6


@dataclass
class Recorded:
    """A drafter that remembers its calls and their answers."""

    drafter: Drafter
    calls: list[tuple[DraftCall, DraftResult]] = field(default_factory=list)

    @property
    def capabilities(self) -> Capabilities:
        return self.drafter.capabilities

    def draft(self, call: DraftCall) -> DraftResult:
        result = self.drafter.draft(call)
        self.calls.append((call, result))
        return result

    def draft_ahead(self) -> bool:
        return self.drafter.draft_ahead()


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    engine = LocalEngine(FlotillaConfig.model_validate(small_family()))
    for name, drafter in engine.drafters.items():
        engine.drafters[name] = Recorded(drafter)
    return engine


def requests() -> list[Submit]:
    return [
        Submit(
            request_id=f"r{number}",
            prompt=[(17 * number + 31 * i) % 4000 + 4 for i in range(5 + 7 * number)],
            sampling=SamplingParams(temperature=0.0 if number % 2 else 0.8, max_tokens=24, seed=number),
        )
        for number in range(NUM_REQUESTS)
    ]


def run(
    engine: LocalEngine, **policy: object
) -> tuple[dict[str, list[int]], list[tuple[DraftCall, DraftResult]]]:
    """Outputs, and the calls of the drafters that have probabilities."""
    raw = engine.config.model_dump()
    raw["policy"] = policy
    engine.use_policy(FlotillaConfig.model_validate(raw))
    for drafter in engine.drafters.values():
        assert isinstance(drafter, Recorded)
        drafter.calls.clear()
    tokens = {name: completion.tokens for name, completion in engine.generate(requests()).items()}
    recorded = [d for d in engine.drafters.values() if isinstance(d, Recorded)]
    return tokens, [call for d in recorded if d.capabilities.has_probabilities for call in d.calls]


def test_with_specserve_every_draft_ends_where_its_rule_says(engine: LocalEngine) -> None:
    plain, _ = run(engine, name="autoregressive")
    tokens, calls = run(engine, name="specserve", max_depth=6)
    assert tokens == plain
    ended_early = 0
    for call, result in calls:
        limits = {item.request_id: item.plan.depth for item in call.items}
        if not any(limits.values()):
            continue
        assert call.stop_rule is not None
        adaptive = AdaptiveDrafter(call.stop_rule)
        trees = {draft.request_id: draft.tree for draft in result.drafts}
        depth = max(int(tree.depth.max()) for tree in trees.values())
        for layer in range(1, depth + 1):
            acceptance = [float(np.exp(t.logp[layer])) for t in trees.values() if len(t) > layer]
            if layer > 1:
                going_on = [float(np.exp(t.logp[layer - 1])) for t in trees.values() if len(t) > layer]
                assert adaptive.pays(going_on)
            adaptive.correct(acceptance)
        going_on = [
            float(np.exp(tree.logp[-1]))
            for name, tree in trees.items()
            if len(tree) == depth + 1 and limits[name] > depth
        ]
        if going_on:
            ended_early += 1
            assert not adaptive.pays(going_on)
    assert ended_early > 0


def test_with_threshold_every_draft_ends_with_the_token_that_fell_below(engine: LocalEngine) -> None:
    plain, _ = run(engine, name="autoregressive")
    tokens, calls = run(engine, name="threshold", max_depth=6, confidence_threshold=0.4)
    assert tokens == plain
    drafted = verified = 0
    for call, result in calls:
        limits = {item.request_id: item.plan.depth for item in call.items}
        for draft in result.drafts:
            own = np.exp(np.diff(draft.tree.logp.astype(np.float64)))
            assert (own[:-1] >= 0.4 - 1e-6).all()
            if len(own) and len(own) < limits[draft.request_id]:
                assert own[-1] < 0.4 + 1e-6
            drafted += len(own)
    verified = engine.core.totals.verified_tokens
    assert drafted > 0
    # Everything drafted is verified, but for drafts of requests that ended meanwhile.
    assert engine.core.totals.drafted_tokens >= verified >= drafted
