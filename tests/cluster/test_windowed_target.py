"""A target whose layers see windows is served losslessly, through the whole engine and beyond the windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.config import FlotillaConfig
from cluster.local import LocalEngine
from cluster.stream_messages import Submit
from engine.sampling_params import SamplingParams
from tests.engine import tiny_models

LENGTHS = (5, 61, 80, 64)
MAX_TOKENS = 24


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, tiny_models.VOCABULARY, length).tolist() for length in LENGTHS]


def said_by_transformers(name: str) -> list[list[int]]:
    """Greedy answers of the model by itself, token by token."""
    model, answers = tiny_models.build(name), []
    for prompt in prompts():
        tokens = list(prompt)
        for _ in range(MAX_TOKENS):
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


@pytest.mark.parametrize("name", ["gpt_oss_window", "gemma2_window"])
def test_drafts_change_no_text(name: str, tmp_path: Path) -> None:
    path = str(tiny_models.write(name, tmp_path))
    config = FlotillaConfig.model_validate(
        {
            "target": {"path": path, "num_slots": 512, "prefix_sharing": True},
            "drafters": [
                {"kind": "model", "name": "same", "path": path},
                {"kind": "prompt_lookup", "name": "lookup"},
            ],
            "policy": {"name": "fixed", "fixed_depth": 4},
            "scheduler": {"prefill_chunk": 16},
        }
    )
    engine, expected = LocalEngine(config), said_by_transformers(name)
    requests = [
        Submit(
            request_id=str(number),
            prompt=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
        )
        for number, prompt in enumerate(prompts())
    ]
    for policy in ("fixed", "adaserve"):
        engine.use_policy(
            config.model_copy(update={"policy": config.policy.model_copy(update={"name": policy})})
        )
        done = engine.generate(requests)
        assert [done[request.request_id].tokens for request in requests] == expected
        assert engine.core.totals.accepted_tokens > 40  # one of its drafters is the target
