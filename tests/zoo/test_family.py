"""The shipped weights, the registry, and what the models have learned."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from zoo import models
from zoo.agreement import accepted_by_chain, drafter_flags, greedy_continuations, lookup_steps, prompt_ids
from zoo.dataset import Tokens
from zoo.publish import total_bytes
from zoo.registry import (
    DOMAINS,
    DRAFTERS,
    MODELS,
    OTHER_VOCABULARY,
    TARGET,
    WEIGHTS,
    load_prompts,
    weights_dir,
)
from zoo.retokenized import SIZES, respell, spellings
from zoo.scored import TOP, Scored
from zoo.tokenizer import load

TOKENIZER = load(weights_dir(TARGET))
# Of each domain; losses are means over all their tokens.
PROMPTS = 12


def test_registry_needs_no_torch() -> None:
    code = "import sys, zoo.registry; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(KeyError, match="nonesuch"):
        weights_dir("nonesuch")
    with pytest.raises(KeyError, match="poetry"):
        load_prompts("poetry")


def test_weights_are_small_and_in_half_precision() -> None:
    assert total_bytes(WEIGHTS) <= 45_000_000
    for name in MODELS:
        model = models.LlamaForCausalLM.from_pretrained(str(weights_dir(name)), dtype="auto")
        assert model.dtype == torch.float16
        assert model.config.max_position_embeddings == models.WINDOW
        assert model.generation_config.eos_token_id == TOKENIZER.eos_token_id


def test_drafters_differ() -> None:
    shapes = [models.SHAPES[name] for name in DRAFTERS]
    assert len(DRAFTERS) >= 4
    assert len(set(shapes)) >= 3


@pytest.mark.parametrize("domain", DOMAINS)
def test_prompts(domain: str) -> None:
    prompts = load_prompts(domain)
    assert len(prompts) >= 120
    for prompt in prompts:
        assert (prompt.kind == "chat") == bool(prompt.messages)
        assert bool(prompt.prompt) != bool(prompt.messages)
        assert prompt.reference
        ids = prompt_ids(TOKENIZER, prompt)
        assert ids[0] == TOKENIZER.bos_token_id
        assert len(ids) + prompt.max_tokens < models.WINDOW


def test_code_has_both_kinds() -> None:
    assert {prompt.kind for prompt in load_prompts("code")} == {"chat", "completion"}


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return models.load(weights_dir(TARGET))


@pytest.mark.parametrize(("domain", "bound"), [("code", 2.6), ("chat", 2.9), ("summary", 3.6)])
def test_target_has_learned_its_domains(target: LlamaForCausalLM, domain: str, bound: float) -> None:
    total, count = 0.0, 0
    for prompt in load_prompts(domain)[:PROMPTS]:
        ids = prompt_ids(TOKENIZER, prompt)
        reference = TOKENIZER(f"{prompt.reference}<|end|>", add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            given = torch.tensor([[*ids, *reference]])
            logits = target(given, logits_to_keep=len(reference) + 1).logits[0, :-1]
            total += float(
                torch.nn.functional.cross_entropy(logits, torch.tensor(reference), reduction="sum")
            )
        count += len(reference)
    assert total / count < bound


def test_drafters_follow_the_target_on_their_domain(target: LlamaForCausalLM) -> None:
    """A few prompts only; the model card has the whole table."""
    specialists = {
        "code": "drafter-code-2x128",
        "chat": "drafter-chat-2x128",
        "summary": "drafter-summary-1x128",
    }
    for domain, name in specialists.items():
        prompts = load_prompts(domain)[:2]
        encoded = [prompt_ids(TOKENIZER, prompt) for prompt in prompts]
        answers = greedy_continuations(target, encoded, [24] * len(prompts))
        drafter = models.load(weights_dir(name))
        flags = [drafter_flags(drafter, ids, answer) for ids, answer in zip(encoded, answers, strict=True)]
        assert sum(f.sum() for f in flags) / sum(map(len, flags)) > 0.45, domain


def test_chain_arithmetic() -> None:
    flags = torch.tensor([1, 1, 1, 1, 1, 0, 1, 0, 0]).bool().numpy()
    assert accepted_by_chain(flags, 4) == [4, 0, 1, 0]
    assert lookup_steps([5, 6, 7, 8, 5, 6], [7, 8, 9], 4) == [2]


def test_a_vocabulary_of_its_own_spells_every_token_of_the_targets() -> None:
    for name in OTHER_VOCABULARY:
        small = load(weights_dir(name))
        assert len(small) == SIZES[name]
        assert models.load(weights_dir(name)).config.vocab_size == SIZES[name]
        table = spellings(TOKENIZER, small)
        for token in (2, 100, 1500, 4095):
            row = [piece for piece in table[token].tolist() if piece >= 0]
            assert small.decode(row) == TOKENIZER.decode([token])


def test_respelled_distributions_are_those_of_the_targets_tokens() -> None:
    """Tokens spelled a, a b and c with probabilities 0.5, 0.3 and 0.1, of which the second came."""
    table = np.array([[0, -1], [0, 1], [2, -1]] + [[3, -1]] * 40, np.int16)
    ids = np.array([2, 1], np.int16)
    tokens = Tokens(ids, np.array([0, 1], np.uint8), np.array([0, 2]), np.zeros(1, np.uint8))
    p = np.full(TOP, 1e-5)
    p[:3] = 0.5, 0.3, 0.1
    top = np.array([[0, 1, 2, *range(3, TOP)]], np.int16)
    found = respell(Scored(tokens, top, np.log(p)[None].astype(np.float16)), table, 64)
    assert found.tokens.ids.tolist() == [2, 0, 1]
    assert found.tokens.answer.tolist() == [0, 1, 1]
    assert found.tokens.starts.tolist() == [0, 3]
    first, second = (
        dict(zip(i.tolist(), np.exp(v), strict=True))
        for i, v in zip(found.top_ids, found.top_logp.astype(float), strict=True)
    )
    assert first[0] == pytest.approx(0.8, rel=1e-2)
    assert first[2] == pytest.approx(0.1, rel=1e-2)
    assert second[1] == pytest.approx(1.0, rel=1e-2)
