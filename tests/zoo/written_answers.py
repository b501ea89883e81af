"""A small target's answers to a few prompts, as `flotilla zoo distill` has the demo target write them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from zoo import models
from zoo.agreement import prompt_ids
from zoo.generate import continue_batch
from zoo.registry import TARGET, load_prompts, weights_dir
from zoo.scored import ScoredBuilder
from zoo.tokenizer import load

# A step of training takes seconds for the demo target's layer and heads where bfloat16 is slow.
SHAPE = models.Shape(4, 64, 2, 1, 96)


def small_target(folder: Path) -> LlamaForCausalLM:
    """A target of the demo target's vocabulary that has learned nothing; it is written to `folder`, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.SHAPES, "small", SHAPE)
        tokenizer = load(weights_dir(TARGET))
        models.export(models.build("small", tokenizer, seed=1), tokenizer, folder)
    return models.load(folder)


def write(target: LlamaForCausalLM, folder: Path) -> list[tuple[list[int], list[int]]]:
    """Write greedy answers to three prompts to `folder`, and return prompts and answers."""
    tokenizer = load(weights_dir(TARGET))
    built = ScoredBuilder()
    answers = []
    for prompt in load_prompts("code")[:3]:
        ids = prompt_ids(tokenizer, prompt)
        end = int(target.config.eos_token_id)
        ((answer, top_ids, top_logp),) = continue_batch(
            target, torch.tensor([ids]), torch.tensor([0.0]), end, 12
        )
        built.add(0, ids, answer, top_ids, top_logp)
        answers.append((ids, answer))
    built.build().save(folder / "generated-0.npz")
    return answers
