"""`max_model_len` is the longest sequence that target and drafter serve."""

from __future__ import annotations

import pytest

from cluster.config import FlotillaConfig
from cluster.local import LocalEngine
from cluster.stream_messages import Submit
from engine.sampling_params import SamplingParams

SMALL = "zoo:drafter-summary-1x128"


def engine(target: int | None, drafter: int | None) -> LocalEngine:
    return LocalEngine(
        FlotillaConfig.model_validate(
            {
                "target": {"path": SMALL, "num_slots": 2048, "max_model_len": target},
                "drafters": [{"kind": "model", "name": "small", "path": SMALL, "max_model_len": drafter}],
                "policy": {"name": "fixed"},
            }
        )
    )


def generated(serving: LocalEngine, prompt_len: int) -> tuple[int, int]:
    """Tokens generated for a prompt of that length, and how many of them were drafted."""
    before = serving.core.totals.accepted_tokens
    request = Submit(
        request_id="r",
        prompt=[5 + i % 7 for i in range(prompt_len)],
        sampling=SamplingParams(temperature=0.0, max_tokens=30),
    )
    tokens = serving.generate([request])["r"].tokens
    return len(tokens), serving.core.totals.accepted_tokens - before


def test_an_answer_ends_at_the_target_s_and_drafts_at_the_drafter_s() -> None:
    serving = engine(64, 48)
    assert serving.core.max_model_tokens == 64
    length, accepted = generated(serving, 10)
    assert length == 30
    assert accepted > 10  # the drafter is the target
    length, accepted = generated(serving, 50)
    assert length == 14  # prompt and output
    assert accepted == 0


def test_more_than_the_model_takes_is_refused() -> None:
    with pytest.raises(Exception, match="max_model_len 1025 is more than"):
        engine(1025, None)
