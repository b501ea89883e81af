"""The stop on a token's probability against Transformers' own assisted generation."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from drafters.messages import DraftPlan
from engine.sampling_params import SamplingParams
from tests.drafters.tiny import call, drafter, llama, opening, prompt, trees

MODEL = llama()
DEPTH = 8


def transformers_candidates(tokens: list[int], threshold: float) -> list[int]:
    """What the assistant of `generate(assistant_model=...)` proposes after `tokens`, at most DEPTH."""
    assistant = copy.deepcopy(MODEL)
    config = assistant.generation_config
    config.num_assistant_tokens = DEPTH
    config.assistant_confidence_threshold = threshold
    target = copy.deepcopy(config)
    target.do_sample, target.min_length, target.max_length = False, 0, 200
    input_ids = torch.tensor([tokens])
    generator = AssistedCandidateGenerator(
        input_ids, assistant, target, {"attention_mask": torch.ones_like(input_ids)}
    )
    candidates, _ = generator.get_candidates(input_ids)
    return candidates[0, len(tokens) :].tolist()


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.2, 0.4, 0.7, 0.95])
def test_drafts_are_as_long_as_those_of_transformers(threshold: float) -> None:
    stop = math.log(threshold) if threshold else -math.inf
    end = MODEL.generation_config.eos_token_id
    sampling = SamplingParams(temperature=0.0, max_tokens=99, stop_token_ids=(end,))
    lengths = set()
    for seed in range(6):
        tokens = prompt(seed, 12)
        plan = DraftPlan(depth=DEPTH, stop_token_logp=stop)
        tree = trees(drafter(MODEL).draft(call(opening("a", tokens, plan, sampling=sampling))))["a"]
        assert tree.token[1:].tolist() == transformers_candidates(tokens, threshold)
        lengths.add(len(tree) - 1)
    if threshold in (0.1, 0.2, 0.4):
        assert len(lengths) > 1
