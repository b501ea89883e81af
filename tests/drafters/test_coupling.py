"""Gumbel coupling: drafts of sampling requests are ranked by the rule that decides the target's token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from drafters.messages import DraftPlan
from engine.sampling import Row, TokenHistory, decide, perturbed_scores
from engine.sampling_params import SamplingParams
from tests.drafters.tiny import call, drafter, following, llama, opening, perturbed, prompt, trees

MODEL = llama()
SAMPLINGS = [
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.7, seed=-5, top_p=0.9, top_k=20, min_p=0.01),
    SamplingParams(
        temperature=1.3, seed=2, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2
    ),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, logit_bias={3: 4.0, 5: -9.0}),
    SamplingParams(temperature=0.8, seed=2**63, min_tokens=8, stop_token_ids=tuple(range(0, 50, 3))),
]


@torch.inference_mode()
def target_logits(model: LlamaForCausalLM, tokens: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits
    return logits[0, -1:].float()


def described(sampling: SamplingParams, tokens: list[int], prompt_len: int) -> Row:
    history = TokenHistory(tokens[:prompt_len], tokens[prompt_len:])
    return Row(sampling, len(tokens) - prompt_len, history)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_targets_own_weights_propose_the_targets_choice_first(sampling: SamplingParams) -> None:
    d, tokens = drafter(MODEL), prompt(1, 10)
    heard, agreed, scored = 0, 0, 0
    for step in range(16):
        plan = DraftPlan(depth=step % 4 + 1, width=step % 3 + 1)
        item = (
            following("a", heard, tokens[heard:], plan)
            if heard
            else opening("a", tokens, plan, sampling=sampling)
        )
        (draft,) = d.draft(call(item)).drafts
        heard, agreed, scored = len(tokens), agreed + draft.num_agreed, scored + draft.num_scored
        row = described(sampling, tokens, 10)
        logits = target_logits(MODEL, tokens)
        chosen = int(decide(logits, [row]).tokens)
        assert draft.tree.token[1] == chosen
        expected = perturbed_scores(logits, [row]).log_softmax(-1)[0]
        layer = draft.tree.depth == 1
        np.testing.assert_allclose(draft.tree.logp[layer], expected[draft.tree.token[layer]], atol=1e-3)
        # Two tokens at a time, one of them not the target's own, so that catching up has rows to score.
        tokens += [chosen, 7] if step % 2 else [chosen]
    assert scored == len(tokens) - 10 - (1 if step % 2 == 0 else 2)
    assert agreed >= 15


@pytest.mark.parametrize("sampling", SAMPLINGS[:3])
def test_deeper_nodes_are_ranked_by_their_own_position_and_path(sampling: SamplingParams) -> None:
    tokens = prompt(2, 12)
    tree = trees(drafter(MODEL).draft(call(opening("a", tokens, DraftPlan(3, 3), sampling=sampling))))["a"]
    for node in range(1, len(tree)):
        parent = int(tree.parent[node])
        path = tree.token[tree.path(parent)[1:]].tolist()
        row = described(sampling, tokens + path, 12)
        step = perturbed_scores(target_logits(MODEL, tokens + path), [row]).log_softmax(-1)[0]
        assert tree.logp[node] - tree.logp[parent] == pytest.approx(float(step[tree.token[node]]), abs=1e-3)


def test_a_mixed_batch_ranks_each_request_by_its_own_rule() -> None:
    params = [SamplingParams(temperature=0.0), *SAMPLINGS, SamplingParams(temperature=0.0)]
    items = [opening(f"r{i}", prompt(i, 9), DraftPlan(3, 2), sampling=p) for i, p in enumerate(params)]
    together = trees(drafter(MODEL).draft(call(*items)))
    for item in items:
        alone = trees(drafter(MODEL).draft(call(item)))[item.request_id]
        np.testing.assert_array_equal(together[item.request_id].token, alone.token)


def test_coupling_raises_acceptance() -> None:
    near, d_width = perturbed(MODEL, 0.25), 2
    hits = uncoupled = 0
    trials = 150
    prompts = [prompt(trial, 8) for trial in range(trials)]
    samplings = [SamplingParams(temperature=1.0, seed=trial) for trial in range(trials)]
    items = [
        opening(str(trial), prompts[trial], DraftPlan(1, d_width), sampling=samplings[trial])
        for trial in range(trials)
    ]
    drafted = trees(drafter(near, num_slots=2048).draft(call(*items)))
    with torch.inference_mode():
        wanted, found = (model(torch.tensor(prompts)).logits[:, -1].float() for model in (MODEL, near))
    for trial, sampling in enumerate(samplings):
        chosen = int(decide(wanted[trial, None], [Row(sampling, 0)]).tokens)
        hits += chosen in drafted[str(trial)].token[1:]
        uncoupled += chosen in found[trial].topk(d_width).indices
    assert hits > uncoupled + 0.1 * trials
