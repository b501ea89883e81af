"""A target that gives no numbers for some token: those requests end with an error, others as ever."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from cluster.config import FlotillaConfig
from cluster.local import LocalEngine
from cluster.stream_messages import Submit
from engine.sampling_params import SamplingParams
from tests.random_llama import random_llama

BROKEN = 1777


def test_requests_for_which_the_model_has_no_numbers_end_with_an_error(tmp_path: Path) -> None:
    """The self-test does not come to every token."""
    model = random_llama(0, vocab_size=2000, max_position_embeddings=96, initializer_range=0.3)
    with torch.no_grad():
        model.model.embed_tokens.weight[BROKEN] = math.nan
    model.save_pretrained(tmp_path)
    config = FlotillaConfig.model_validate(
        {
            "target": {"path": str(tmp_path), "num_slots": 512},
            "drafters": [{"kind": "prompt_lookup", "name": "lookup"}],
            "policy": {"name": "fixed", "fixed_depth": 4},
            "scheduler": {"prefill_chunk": 16},
        }
    )
    engine = LocalEngine(config)
    whole = list(range(10, 40))
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    turned = SamplingParams(temperature=0.0, max_tokens=12, logit_bias={BROKEN: 100.0})

    def asked(**prompts: list[int]) -> list[Submit]:
        return [
            Submit(request_id=name, prompt=prompt, sampling=turned if name == "turned" else greedy)
            for name, prompt in prompts.items()
        ]

    alone = engine.generate(asked(whole=whole))["whole"]
    together = engine.generate(
        asked(whole=whole, broken=[*whole[:20], BROKEN], one=[BROKEN], turned=whole[:7])
    )
    assert together["whole"].tokens == alone.tokens
    assert {
        name: (done.finish_reason, done.tokens) for name, done in together.items() if name != "whole"
    } == {
        "broken": ("error", []),
        "one": ("error", []),
        "turned": ("error", [BROKEN]),
    }
    assert all(done.receipt is not None for done in together.values())
    # What it left behind in the cache spoils nobody, either.
    assert engine.generate(asked(whole=whole))["whole"].tokens == alone.tokens
