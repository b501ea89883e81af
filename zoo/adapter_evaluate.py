"""What the adapter changes on the held-out prompts: losses, lengths of answers, answers of one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from engine.adapter_files import merge, read_adapter
from zoo import evaluate, models
from zoo.adapter_data import CUT, is_sentence, opening
from zoo.agreement import greedy_continuations
from zoo.evaluate import Reading
from zoo.registry import ADAPTER, DOMAINS, TARGET
from zoo.tokenizer import load as load_tokenizer


def is_one_sentence(tokenizer: PreTrainedTokenizerFast, answer: Sequence[int]) -> bool:
    """Whether an answer ended by itself, and its first sentence is all of it."""
    text: str = tokenizer.decode(answer, skip_special_tokens=True).strip()
    has_ended: bool = answer[-1] == tokenizer.eos_token_id
    return has_ended and text == opening(text)


def measure(reading: Reading, weights: Path) -> dict[str, Any]:
    """The same figures of the target alone (`without`) and with the adapter (`with`).

    By domain the mean tokens of greedy answers and the loss of the references (nats per token); of ``CUT``
    the loss of the references' first sentences, and the share of greedy answers that are one sentence.
    """
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(weights / TARGET)
    target = models.load(weights / TARGET)
    without = _figures(target, tokenizer, reading)
    merge(target, read_adapter(ADAPTER, weights / ADAPTER))
    answers = greedy_continuations(target, reading.encoded, [prompt.max_tokens for prompt in reading.prompts])
    losses = evaluate.reference_losses(target, tokenizer, reading.prompts, reading.encoded)
    adapted = replace(reading, answers=answers, losses=losses)
    return {"name": ADAPTER, "without": without, "with": _figures(target, tokenizer, adapted)}


def _figures(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, reading: Reading) -> dict[str, Any]:
    """Of what ``model`` made of the prompts."""
    groups = {d: [i for i, prompt in enumerate(reading.prompts) if prompt.domain == d] for d in DOMAINS}
    cut = [
        (replace(reading.prompts[i], reference=sentence), reading.encoded[i])
        for i in groups[CUT]
        if is_sentence(sentence := opening(reading.prompts[i].reference))
    ]
    terse = evaluate.reference_losses(
        model, tokenizer, [prompt for prompt, _ in cut], [ids for _, ids in cut]
    )
    sentences = [is_one_sentence(tokenizer, reading.answers[i]) for i in groups[CUT]]
    return {
        "terse_loss": terse[CUT],
        "one_sentence": round(float(np.mean(sentences)), 4),
        "answer_tokens": {
            domain: round(float(np.mean([len(reading.answers[i]) for i in ids])), 1)
            for domain, ids in groups.items()
        },
        "held_out_loss": reading.losses,
    }
