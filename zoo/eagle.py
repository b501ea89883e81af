"""Train the target's EAGLE-3 draft layer (``engine.eagle``) on its own answers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from engine.eagle_config import feature_layers
from engine.heads_config import weights_digest
from zoo import eagle_data, eagle_save, generate, models, workers
from zoo.distill import ARGMAX_WEIGHT, divergence
from zoo.eagle_data import EagleBatch
from zoo.eagle_model import EagleModel
from zoo.learning import learn
from zoo.optimizer import SharedOptimizer
from zoo.registry import EAGLE, TARGET
from zoo.scored import Scored

#: Layers of a draft that are trained; deeper drafts go on as the last of them.
STEPS = 4
#: What each further layer counts for in the loss, relative to the one before (the paper's).
DECAY = 0.8
LEARNING_RATE = 4e-3
ROWS = 16


class Teaching:
    """A new layer, ``eagle``, and the target that teaches it, which stays as it is."""

    def __init__(self, target: LlamaForCausalLM, device: torch.device) -> None:
        """A layer for ``target``; both go to the device."""
        self.eagle = EagleModel(target.config).to(device)
        self._target = target.to(device, torch.bfloat16).requires_grad_(requires_grad=False)
        self._layers = feature_layers(target.config.num_hidden_layers)
        self._device = device

    def loss(self, batch: EagleBatch) -> tuple[Tensor, list[float]]:
        """Training loss, and per layer the share of rows whose most probable token is the target's.

        As for the drafters: divergence from the target's distribution, and some cross-entropy to its mode.
        """
        target, device = self._target, self._device
        ids, where, top_ids, top_logp = (
            torch.from_numpy(x).to(device) for x in (batch.ids, batch.where, batch.top_ids, batch.top_logp)
        )
        read = eagle_data.features(target, ids, self._layers).clone()
        embeds = target.model.embed_tokens(ids.roll(-1, 1))
        best = top_ids[:, 0]
        loss, agreement = torch.zeros((), device=device), []
        with torch.autocast(device.type, torch.bfloat16):
            hidden = self.eagle(read, embeds, STEPS)
            logits = [target.lm_head(x.flatten(0, 1)[where].to(torch.bfloat16)).float() for x in hidden]
        for step, mine in enumerate(logits):
            cross_entropy = torch.nn.functional.cross_entropy(mine, best)
            each = divergence(mine, top_ids, top_logp) + ARGMAX_WEIGHT * cross_entropy
            loss = loss + DECAY**step * each
            agreement.append(float((mine.argmax(-1) == best).float().mean()))
        return loss, agreement


def train(target_dir: Path, data: Path, folder: Path, minutes: float) -> Path:
    """Train for a budget of minutes on the answers in ``data``; returns the directory ``folder/model``."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    teaching = Teaching(models.load(target_dir), device)
    optimizer = SharedOptimizer(teaching.eagle, LEARNING_RATE, LEARNING_RATE)
    answers = Scored.load(sorted(data.glob("generated-*.npz")))
    rows = ROWS * (16 if device.type == "cuda" else 1)
    learn(eagle_data.batches(answers, rows, seed=13), teaching.loss, optimizer, folder, minutes, window=50)
    eagle_save.save(folder / "model", teaching.eagle, TARGET, weights_digest(target_dir))
    return folder / "model"


def run(
    data: Path, target: Path, out: Path, minutes: float, write_minutes: float, processes: int = 2
) -> Path:
    """Both stages; answers of the target that exist already in ``data`` are kept.

    ``minutes`` are of processor time: for training, and ``write_minutes`` for the target to write answers in
    each of the processes.
    """
    if torch.cuda.is_available():
        processes = 1
    workers.run(generate.write_answers, (target, data, write_minutes), processes)
    return train(target, data, out / EAGLE, minutes)
