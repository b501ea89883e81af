"""Tiny random Llamas and shorthands for draft calls."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from transformers import LlamaForCausalLM

from drafters.messages import DraftCall, DraftItem, DraftPlan, DraftResult
from drafters.model_drafter import ModelDrafter
from engine.hf_runner import HFRunner
from engine.sampling_params import RequestSpec, SamplingParams
from engine.tree import TokenTree
from tests.random_llama import random_llama

VOCAB = 50
GREEDY = SamplingParams(temperature=0.0, max_tokens=10_000)


def llama(seed: int = 0, max_tokens: int = 256, vocab_size: int = VOCAB) -> LlamaForCausalLM:
    """A random Llama, sharp enough that candidates differ."""
    return random_llama(
        seed, vocab_size=vocab_size, max_position_embeddings=max_tokens, initializer_range=0.3
    )


def perturbed(model: LlamaForCausalLM, scale: float, seed: int = 1) -> LlamaForCausalLM:
    """A copy with noise on its weights: a drafter near its target."""
    torch.manual_seed(seed)
    near = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter += scale * parameter.std() * torch.randn_like(parameter)
    return near


def drafter(model: LlamaForCausalLM, num_slots: int = 1024, **options: int) -> ModelDrafter:
    return ModelDrafter(HFRunner(copy.deepcopy(model), num_slots), **options)  # type: ignore[arg-type]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def opening(
    request_id: str,
    tokens: Sequence[int],
    plan: DraftPlan,
    *,
    prompt_len: int | None = None,
    sampling: SamplingParams = GREEDY,
) -> DraftItem:
    spec = RequestSpec(
        request_id=request_id,
        tokens=list(tokens),
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        sampling=sampling,
    )
    return DraftItem(request_id=request_id, start=0, tokens=np.zeros(0, np.int32), plan=plan, spec=spec)


def following(request_id: str, start: int, tokens: Sequence[int], plan: DraftPlan) -> DraftItem:
    return DraftItem(request_id=request_id, start=start, tokens=np.array(tokens, np.int32), plan=plan)


def call(*items: DraftItem, release: Iterable[str] = (), ahead: bool = False) -> DraftCall:
    return DraftCall(call_id=1, items=list(items), release=list(release), ahead_s=math.inf if ahead else 0.0)


def trees(result: DraftResult) -> dict[str, TokenTree]:
    for draft in result.drafts:
        draft.tree.validate()
    return {draft.request_id: draft.tree for draft in result.drafts}


def assert_same_tree(a: TokenTree, b: TokenTree) -> None:
    np.testing.assert_array_equal(a.token, b.token)
    np.testing.assert_array_equal(a.parent, b.parent)
    np.testing.assert_array_equal(a.depth, b.depth)
    np.testing.assert_allclose(a.logp, b.logp, atol=1e-4)


@torch.inference_mode()
def log_probs(model: LlamaForCausalLM, tokens: Sequence[int]) -> torch.Tensor:
    """float32 [vocab] after `tokens`, by the plain forward of Transformers."""
    logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits
    return logits[0, -1].float().log_softmax(-1)
