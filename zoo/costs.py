"""CPU cost of the steps speculation is made of: target step, verification of a chain, one draft step, in
seconds.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from statistics import median

import torch
from transformers import DynamicCache, LlamaForCausalLM

#: Tokens of context in the cache while measuring, about that of a prompt with half its answer.
CONTEXT = 128


@dataclass(frozen=True)
class Costs:
    """Median CPU seconds of a forward of the target over one and over ``chain + 1`` tokens, and of each
    drafter.
    """

    target_step: float
    verify: float
    draft: dict[str, float]


def _shape(model: LlamaForCausalLM) -> str:
    config = model.config
    return f"{config.num_hidden_layers}x{config.hidden_size}x{config.intermediate_size}"


@torch.inference_mode()
def _prepared(model: LlamaForCausalLM) -> DynamicCache:
    cache = DynamicCache()
    model.model(torch.randint(10, 4000, (1, CONTEXT)), past_key_values=cache, use_cache=True)
    return cache


@torch.inference_mode()
def _once(model: LlamaForCausalLM, cache: DynamicCache, tokens: int) -> float:
    """CPU seconds of this thread (immune to preemption by others) for one forward of ``tokens`` tokens."""
    given = torch.randint(10, 4000, (1, tokens))
    begun = time.thread_time()
    model(given, past_key_values=cache, use_cache=True)
    spent = time.thread_time() - begun
    cache.crop(-tokens)
    return spent


def measure(
    target: LlamaForCausalLM, drafters: dict[str, LlamaForCausalLM], chain: int, rounds: int = 30
) -> Costs:
    """Time all models in rounds of changing order, in float32 through Transformers with one torch thread.

    Each turn runs a model ``chain`` times in a row and leaves the first time out: in service a model has a
    process of its own and finds its weights in the processor's cache. Models of one shape share their times.
    """
    torch.set_num_threads(1)
    subjects: dict[str, tuple[LlamaForCausalLM, int]] = {"step": (target, 1), "verify": (target, chain + 1)}
    subjects |= {name: (model, 1) for name, model in drafters.items()}
    kinds = {name: f"{_shape(model)} {tokens}" for name, (model, tokens) in subjects.items()}
    caches = {name: _prepared(model) for name, (model, _) in subjects.items()}
    times: dict[str, list[float]] = {kind: [] for kind in kinds.values()}
    order = list(subjects)
    generator = random.Random(0)
    for _ in range(rounds):
        generator.shuffle(order)
        for name in order:
            model, tokens = subjects[name]
            spent = [_once(model, caches[name], tokens) for _ in range(chain)]
            times[kinds[name]] += spent[1:]
    middle = {name: median(times[kind]) for name, kind in kinds.items()}
    return Costs(middle.pop("step"), middle.pop("verify"), middle)
