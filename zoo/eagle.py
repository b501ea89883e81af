"""Train the target's EAGLE-3 draft layer (``engine.eagle``) on its own answers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from transformers import LlamaForCausalLM

from engine.eagle_config import feature_layers
from engine.heads_config import weights_digest
from zoo import clock, eagle_data, eagle_save, generate, models
from zoo.dataset import Tokens
from zoo.distill import ARGMAX_WEIGHT, divergence
from zoo.eagle_data import EagleBatch
from zoo.eagle_model import EagleModel
from zoo.optimizer import SharedOptimizer
from zoo.registry import EAGLE, TARGET
from zoo.scored import Scored
from zoo.train import schedule

#: Layers of a draft that are trained; deeper drafts go on as the last of them.
STEPS = 4
#: What each further layer counts for in the loss, relative to the one before (the paper's).
DECAY = 0.8
LEARNING_RATE = 4e-3
ROWS = 16


class Teaching(nn.Module):
    """The layer and the target that teaches it, which stays as it is."""

    def __init__(self, target: LlamaForCausalLM) -> None:
        """A new layer for ``target``."""
        super().__init__()
        self.eagle = EagleModel(target.config)
        self._frozen = [target.to(torch.bfloat16).requires_grad_(requires_grad=False)]
        self._layers = feature_layers(target.config.num_hidden_layers)

    def loss(self, batch: EagleBatch, device: torch.device) -> tuple[Tensor, list[float]]:
        """Training loss, and per layer the share of rows whose most probable token is the target's.

        As for the drafters: divergence from the target's distribution, and some cross-entropy to its mode.
        """
        target = self._frozen[0]
        ids = torch.from_numpy(batch.ids).to(device)
        where = torch.from_numpy(batch.where).to(device)
        top_ids, top_logp = (torch.from_numpy(x).to(device) for x in (batch.top_ids, batch.top_logp))
        read = eagle_data.features(target, ids, self._layers).clone()
        embeds = target.model.embed_tokens(ids.roll(-1, 1))
        loss, agreement = torch.zeros((), device=device), []
        with torch.autocast(device.type, torch.bfloat16):
            hidden = self.eagle(read, embeds, STEPS)
            logits = [target.lm_head(x.flatten(0, 1)[where].to(torch.bfloat16)).float() for x in hidden]
        for step, mine in enumerate(logits):
            best = top_ids[:, 0]
            each = divergence(mine, top_ids, top_logp) + ARGMAX_WEIGHT * nn.functional.cross_entropy(
                mine, best
            )
            loss = loss + DECAY**step * each
            agreement.append(float((mine.argmax(-1) == best).float().mean()))
        return loss, agreement


def train(target_dir: Path, data: Path, folder: Path, minutes: float, threads: int = 1) -> Path:
    """Train for a budget of minutes on the answers in ``data``; returns the directory ``folder/model``."""
    torch.set_num_threads(threads)
    torch.manual_seed(5)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder.mkdir(parents=True, exist_ok=True)
    target = models.load(target_dir)
    teaching = Teaching(target).to(device)
    optimizer = SharedOptimizer(teaching.eagle, LEARNING_RATE, LEARNING_RATE)
    answers = Scored.load(sorted(data.glob("generated-*.npz")))
    rows = ROWS * (16 if device.type == "cuda" else 1)
    begun = clock.seconds()
    means: list[float] = []
    for step, batch in enumerate(eagle_data.batches(answers, rows, seed=13), 1):
        loss, agreement = teaching.loss(batch, device)
        loss.backward()
        progress = min((clock.seconds() - begun) / (minutes * 60.0), 1.0)
        optimizer.step(schedule(progress))
        now = [float(loss.detach()), *agreement]
        means = now if not means else [0.98 * mean + 0.02 * new for mean, new in zip(means, now, strict=True)]
        if step % 25 == 0 or progress >= 1.0:
            record = {"step": step, "seconds": round(clock.seconds() - begun), "loss": round(means[0], 4)}
            with (folder / "log.jsonl").open("a") as file:
                file.write(json.dumps({**record, "agreement": [round(a, 4) for a in means[1:]]}) + "\n")
        if progress >= 1.0:
            break
    eagle_save.save(folder / "model", teaching.eagle, TARGET, weights_digest(target_dir))
    return folder / "model"


def _write(part: int, target: Path, data: Path, minutes: float) -> None:
    torch.set_num_threads(1)
    written = data / f"generated-{part}.npz"
    if not written.exists():
        tokens = Tokens.load(data / "train.npz")
        generate.generate(target, tokens, minutes, seed=100 + part).save(written)


def run(
    data: Path, target: Path, out: Path, minutes: float, write_minutes: float, processes: int = 2
) -> Path:
    """Both stages; answers of the target that exist already in ``data`` are kept.

    ``minutes`` are of processor time: for training, and ``write_minutes`` for the target to write answers in
    each of the processes.
    """
    if torch.cuda.is_available():
        processes = 1
    start_processes(_write, args=(target, data, write_minutes), nprocs=processes, start_method="spawn")
    return train(target, data, out / EAGLE, minutes)
