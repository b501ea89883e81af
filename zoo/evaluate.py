"""Evaluate the family on the shipped held-out prompts: acceptance, tokens per step, goodput, the best
choice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from zoo import agreement, costs, models
from zoo.generate import continue_batch
from zoo.registry import DOMAINS, DRAFTERS, TARGET, WEIGHTS, Prompt, load_prompts
from zoo.tokenizer import load as load_tokenizer

#: Length of the drafted chains, in tokens.
CHAIN = 4
LOOKUP = "prompt-lookup"
ALL = "all"


@dataclass(frozen=True)
class Measured:
    """One drafter on one prompt: tokens the target wrote, agreements with it, verify steps, seconds a
    token.
    """

    tokens: int
    same: int
    steps: int
    goodput: float


def _measure(accepted: list[int], tokens: int, same: int, step_seconds: float) -> Measured:
    return Measured(tokens, same, len(accepted), tokens / (len(accepted) * step_seconds))


def _by_prompt(
    prompts: list[list[int]],
    answers: list[list[int]],
    drafters: dict[str, LlamaForCausalLM],
    cost: costs.Costs,
) -> dict[str, list[Measured]]:
    result: dict[str, list[Measured]] = {name: [] for name in (*drafters, LOOKUP)}
    for prompt, answer in zip(prompts, answers, strict=True):
        for name, model in drafters.items():
            flags = agreement.drafter_flags(model, prompt, answer)
            seconds = CHAIN * cost.draft[name] + cost.verify
            accepted = agreement.accepted_by_chain(flags, CHAIN)
            result[name].append(_measure(accepted, len(answer), int(flags.sum()), seconds))
        accepted = agreement.lookup_steps(prompt, answer, CHAIN)
        result[LOOKUP].append(_measure(accepted, len(answer), sum(accepted), cost.verify))
    return result


def _summary(measured: list[Measured]) -> dict[str, float]:
    tokens, steps = sum(m.tokens for m in measured), sum(m.steps for m in measured)
    seconds = sum(m.tokens / m.goodput for m in measured)
    return {
        "acceptance": round(sum(m.same for m in measured) / tokens, 4),
        "tokens_per_step": round(tokens / steps, 3),
        "goodput": round(tokens / seconds, 1),
    }


def _best(results: dict[str, list[Measured]], members: list[int]) -> dict[str, float]:
    """Share of prompts on which each choice has the highest goodput (equal ones share the prompt)."""
    wins = dict.fromkeys(results, 0.0)
    for i in members:
        top = max(results[name][i].goodput for name in results)
        winners = [name for name in results if results[name][i].goodput >= top * (1 - 1e-9)]
        for name in winners:
            wins[name] += 1 / len(winners)
    return {name: round(count / len(members), 4) for name, count in wins.items()}


def reference_losses(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[Prompt],
    encoded: list[list[int]],
) -> dict[str, float]:
    """Mean loss of the references under the target, nats per token, by domain that has prompts."""
    end = int(target.config.eos_token_id)
    totals: dict[str, list[float]] = {domain: [] for domain in DOMAINS}
    with torch.inference_mode():
        for prompt, ids in zip(prompts, encoded, strict=True):
            reference = [*tokenizer(prompt.reference, add_special_tokens=False)["input_ids"], end]
            logits = target(torch.tensor([[*ids, *reference]])).logits[0, len(ids) - 1 : -1]
            each = torch.nn.functional.cross_entropy(logits, torch.tensor(reference), reduction="none")
            totals[prompt.domain] += each.tolist()
    return {domain: round(float(np.mean(values)), 4) for domain, values in totals.items() if values}


def _samples(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[Prompt],
    encoded: list[list[int]],
    answers: list[list[int]],
    per_domain: int,
) -> list[dict[str, Any]]:
    """The first prompts of each domain with greedy and sampled answers, unedited."""
    torch.manual_seed(0)
    end = int(target.config.eos_token_id)
    samples: list[dict[str, Any]] = []
    for domain in DOMAINS:
        members = [i for i, prompt in enumerate(prompts) if prompt.domain == domain][:per_domain]
        for i in members:
            sampled, _, _ = continue_batch(
                target, torch.tensor([encoded[i]]), torch.tensor([0.8]), end, prompts[i].max_tokens
            )[0]
            samples.append(
                {
                    "domain": domain,
                    "prompt": prompts[i].prompt or prompts[i].messages[-1]["content"],
                    "greedy": tokenizer.decode(answers[i]),
                    "sampled": tokenizer.decode(sampled),
                    "reference": prompts[i].reference,
                }
            )
    return samples


@dataclass(frozen=True)
class Reading:
    """What the target alone makes of the prompts: needs no drafters, and is most of an evaluation's time."""

    prompts: list[Prompt]
    encoded: list[list[int]]
    answers: list[list[int]]
    losses: dict[str, float]
    samples: list[dict[str, Any]]


def read(weights: Path = WEIGHTS, limit: int | None = None, samples: int = 6) -> Reading:
    """The target's greedy answers, losses and samples on at most ``limit`` prompts per domain."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(weights / TARGET)
    prompts = [p for domain in DOMAINS for p in load_prompts(domain)[:limit]]
    encoded = [agreement.prompt_ids(tokenizer, prompt) for prompt in prompts]
    target = models.load(weights / TARGET)
    answers = agreement.greedy_continuations(target, encoded, [p.max_tokens for p in prompts])
    losses = reference_losses(target, tokenizer, prompts, encoded)
    return Reading(
        prompts, encoded, answers, losses, _samples(target, tokenizer, prompts, encoded, answers, samples)
    )


def evaluate(reading: Reading, weights: Path = WEIGHTS) -> dict[str, Any]:
    """All figures of the model card."""
    torch.set_num_threads(1)
    target = models.load(weights / TARGET)
    drafters = {name: models.load(weights / name) for name in DRAFTERS}
    cost = costs.measure(target, drafters, CHAIN)
    answers = reading.answers
    results = _by_prompt(reading.encoded, answers, drafters, cost)
    members: dict[str, list[int]] = {
        d: [i for i, p in enumerate(reading.prompts) if p.domain == d] for d in DOMAINS
    }
    groups = {**members, ALL: list(range(len(reading.prompts)))}
    end = target.config.eos_token_id
    return {
        "chain": CHAIN,
        "prompts": {name: len(group) for name, group in groups.items()},
        "costs_ms": {
            "target step": round(1e3 * cost.target_step, 3),
            f"verify {CHAIN + 1}": round(1e3 * cost.verify, 3),
            **{name: round(1e3 * seconds, 3) for name, seconds in cost.draft.items()},
        },
        "plain_goodput": round(1 / cost.target_step, 1),
        "parameters": {
            n: sum(p.numel() for p in m.parameters()) for n, m in {TARGET: target, **drafters}.items()
        },
        "table": {
            name: {group: _summary([values[i] for i in ids]) for group, ids in groups.items()}
            for name, values in results.items()
        },
        "best": {group: _best(results, ids) for group, ids in groups.items()},
        "answer_tokens": {
            g: round(float(np.mean([len(answers[i]) for i in ids])), 1) for g, ids in groups.items()
        },
        "finished": {
            g: round(float(np.mean([answers[i][-1] == end for i in ids])), 3) for g, ids in groups.items()
        },
        "held_out_loss": reading.losses,
        "samples": reading.samples,
    }


def write(result: dict[str, Any], path: Path) -> None:
    """Write the figures as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
