"""The whole engine with decomposed attention returns what it returns with padded attention."""

from __future__ import annotations

import pytest

from cluster.config import FlotillaConfig
from cluster.local import LocalEngine
from cluster.stream_messages import Speculation, Submit
from deployments.demo import demo_config
from engine import decomposed_attention
from engine.decomposition import AttentionCost
from engine.sampling_params import SamplingParams


def requests() -> list[Submit]:
    """Greedy and sampled requests over prompts of very different lengths."""
    return [
        Submit(
            request_id=f"r{number}",
            prompt=[(17 * number + 31 * i) % 4000 + 4 for i in range(length)],
            sampling=SamplingParams(temperature=0.8 * (number % 2), top_p=0.95, max_tokens=12, seed=number),
            speculation=Speculation(),
        )
        for number, length in enumerate((4, 300, 45, 150, 9, 80, 210, 30))
    ]


def configured(attention: str, policy: str) -> FlotillaConfig:
    raw = demo_config().model_dump()
    raw["target"] |= {"num_slots": 2048, "attention": attention}
    raw["policy"] = {"name": policy}
    return FlotillaConfig.model_validate(raw)


def texts(engine: LocalEngine) -> list[list[int]]:
    completions = engine.generate(requests())
    return [completions[request.request_id].tokens for request in requests()]


@pytest.mark.thorough
def test_no_text_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    padded = LocalEngine(configured("padded", "autoregressive"))
    expected = texts(padded)
    # Cuts everything into short pieces, whatever it costs.
    monkeypatch.setattr(decomposed_attention, "COST", AttentionCost(4, 1000, 0.1, 0))
    monkeypatch.setattr(decomposed_attention, "SHORTEST_ROW", 16)
    engine = LocalEngine(configured("decomposed", "autoregressive"), drafters=padded.drafters)
    assert texts(engine) == expected
    totals = engine.core.totals
    assert totals.key_tokens == padded.core.totals.key_tokens > 0
    assert totals.padded_tokens != padded.core.totals.padded_tokens
    engine.use_policy(configured("decomposed", "adaserve"))
    assert texts(engine) == expected
    assert engine.core.totals.verified_tokens > 0
