"""Requests of the demo family's held-out prompts."""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.stream_messages import Submit
from engine.sampling_params import SamplingParams
from zoo.agreement import prompt_ids
from zoo.registry import DOMAINS, TARGET, load_prompts, weights_dir
from zoo.tokenizer import load

NUM_TOKENS = 16

#: Greedy, sampled, and sampled with penalties.
MODES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95, "logprobs": 1},
    {"temperature": 1.0, "top_k": 50, "presence_penalty": 0.4, "repetition_penalty": 1.1, "min_tokens": 3},
)


def of_every_domain() -> list[Submit]:
    """A prompt of every domain in each of the modes."""
    tokenizer = load(weights_dir(TARGET))
    return [
        Submit(
            request_id=f"{domain}{number}",
            prompt=prompt_ids(tokenizer, prompt),
            sampling=msgspec.convert(
                {**mode, "max_tokens": NUM_TOKENS, "seed": number, "stop_token_ids": (2,)}, SamplingParams
            ),
        )
        for domain in DOMAINS
        for number, (mode, prompt) in enumerate(zip(MODES, load_prompts(domain), strict=False))
    ]
