"""Answers of the demo target to a few prompts, as `flotilla zoo distill` has it write them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from zoo.agreement import prompt_ids
from zoo.generate import continue_batch
from zoo.registry import TARGET, load_prompts, weights_dir
from zoo.scored import ScoredBuilder
from zoo.tokenizer import load


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
