"""Train the target's adapter for terse answers (LoRA; Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from zoo import adapter_data, adapter_save, models
from zoo.adapter_data import AdapterBatch
from zoo.adapter_model import adapt
from zoo.dataset import Tokens
from zoo.learning import learn
from zoo.optimizer import SharedOptimizer
from zoo.registry import ADAPTER, TARGET, load_prompts
from zoo.tokenizer import load as load_tokenizer

LEARNING_RATE = 2e-3
ROWS = 16


def adapter_loss(
    model: LlamaForCausalLM, batch: AdapterBatch, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Mean cross-entropy of the response tokens, nats per token, and the share of them that are the model's
    most probable ones.

    In float32: gradients pass through the whole model, and many CPUs are slow in bfloat16.
    """
    ids, where, wanted = (torch.from_numpy(x).to(device) for x in (batch.ids, batch.where, batch.wanted))
    hidden = model.model(ids, use_cache=False).last_hidden_state.flatten(0, 1)
    logits = model.lm_head(hidden[where])
    with torch.no_grad():
        agreement = (logits.argmax(-1) == wanted).float().mean()
    return torch.nn.functional.cross_entropy(logits, wanted), [agreement]


def run(data: Path, target: Path, out: Path, minutes: float) -> Path:
    """Train for a budget of minutes of processor time on the corpus in ``data``; returns the finished
    directory.

    Examples whose answer would be that of a held-out prompt are left out.
    """
    torch.set_num_threads(1)
    torch.manual_seed(9)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    held_out = {adapter_data.opening(prompt.reference) for prompt in load_prompts(adapter_data.CUT)}
    tokenizer = load_tokenizer(data / "tokenizer")
    examples = adapter_data.cut(tokenizer, Tokens.load(data / "train.npz"), held_out)
    model = models.load(target).to(device)
    adapted = adapt(model)
    optimizer = SharedOptimizer(model, LEARNING_RATE, LEARNING_RATE)
    batches = adapter_data.batches(examples, ROWS, seed=14)
    folder = out / ADAPTER
    learn(batches, lambda batch: adapter_loss(model, batch, device), optimizer, folder, minutes, window=50)
    adapter_save.save(folder / "model", adapted, TARGET)
    return folder / "model"
