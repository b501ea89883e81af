"""Train the target: next-token loss on packed rows for a budget of minutes, on CPU processes or one GPU."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaForCausalLM

from zoo import models, workers
from zoo.corpus import DOMAINS
from zoo.dataset import SHARES, Packer, Tokens
from zoo.optimizer import SharedOptimizer
from zoo.tokenizer import load as load_tokenizer

#: Weight of prompt tokens in the loss; responses, which are what the models write, count 1.
PROMPT_WEIGHT = 0.5
MATRIX_LR, OTHER_LR = 3e-3, 3e-3
WARMUP, DECAY_FROM = 0.03, 0.35
LONG_FROM = 0.9


@dataclass(frozen=True)
class Plan:
    """What to train and for how long: ``minutes`` of wall-clock time, ``rows`` of ``length`` tokens per
    rank and step.
    """

    name: str
    data: Path
    out: Path
    minutes: float
    ranks: int = 2
    rows: int = 8
    length: int = 512
    checkpoint_seconds: float = 180.0


def schedule(progress: float) -> float:
    """Learning rate as a share of its peak at ``progress`` in 0..1: warm up, stay, fall linearly to zero."""
    if progress < WARMUP:
        return max(progress / WARMUP, 0.02)
    if progress < DECAY_FROM:
        return 1.0
    return max((1.0 - progress) / (1.0 - DECAY_FROM), 0.0)


def weighted_loss(model: LlamaForCausalLM, ids: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
    """Training loss and the mean loss of response tokens, nats per token. ``ids`` is [rows, length + 1]."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
    each = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    marks = answer[:, 1:].flatten().float()
    weights = PROMPT_WEIGHT + (1.0 - PROMPT_WEIGHT) * marks
    loss = (each * weights).sum() / weights.sum()
    with torch.no_grad():
        response = (each * marks).sum() / marks.sum().clamp(min=1.0)
    return loss, response


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokens: Tokens, per_domain: int = 32) -> dict[str, float]:
    """Mean loss of response tokens per domain over the first held-out examples, nats per token."""
    device = next(model.parameters()).device
    losses: dict[str, float] = {}
    for d, domain in enumerate(DOMAINS):
        total = count = 0.0
        for i in (tokens.domain == d).nonzero()[0][:per_domain]:
            span = slice(tokens.starts[i], tokens.starts[i + 1])
            ids = torch.from_numpy(tokens.ids[span].astype("int64"))[None].to(device)
            answer = torch.from_numpy(tokens.answer[span])[None].to(device)
            _, response = weighted_loss(model, ids, answer)
            marks = float(answer[:, 1:].sum())
            total, count = total + float(response) * marks, count + marks
        losses[domain] = total / max(count, 1.0)
    return losses


def _worker(rank: int, plan: Plan) -> None:
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    folder = plan.out / plan.name
    if plan.ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=plan.ranks
        )
    tokenizer = load_tokenizer(plan.data / "tokenizer")
    model = models.build(plan.name, tokenizer).to(device)
    optimizer = SharedOptimizer(model, MATRIX_LR, OTHER_LR)
    done, step = _resume(folder, rank, model, optimizer)
    optimizer.synchronise()
    packer = Packer(Tokens.load(plan.data / "train.npz"), SHARES, seed=1000 * step + rank)
    held_out = Tokens.load(plan.data / "held_out.npz")
    budget = plan.minutes * 60.0
    rows = plan.rows * (16 if cuda else 1)
    begun = last_save = time.monotonic()
    seen, smooth = 0, 0.0
    progress = done / budget
    while progress < 1.0:
        long = 2 if progress >= LONG_FROM else 1
        ids, answer = packer.rows(rows // long, plan.length * long)
        loss, response = weighted_loss(
            model, torch.from_numpy(ids).to(device), torch.from_numpy(answer).to(device)
        )
        loss.backward()
        elapsed = done + time.monotonic() - begun
        is_due = time.monotonic() - last_save > plan.checkpoint_seconds
        # The ranks agree on the time by averaging it along with the gradients, so they stop at the same step,
        # and save at the same one, as soon as it is due for any of them.
        shared = optimizer.average(torch.tensor([elapsed / budget, float(response), float(is_due)]))
        progress = min(float(shared[0]), 1.0)
        optimizer.step(schedule(progress))
        step += 1
        seen += rows * plan.length * plan.ranks
        smooth = float(shared[1]) if step == 1 or not smooth else 0.95 * smooth + 0.05 * float(shared[1])
        if rank == 0 and step % 10 == 0:
            rate = seen / (time.monotonic() - begun)
            _log(
                folder,
                {"step": step, "seconds": round(elapsed), "loss": round(smooth, 4), "tokens_s": round(rate)},
            )
        if float(shared[2]) > 0.0 or progress >= 1.0:
            _save(_checkpoint(folder, rank), model, optimizer, elapsed, step)
            if rank == 0:
                losses = held_out_loss(model, held_out)
                _log(folder, {"step": step, "seconds": round(elapsed), "held_out": losses})
            last_save = time.monotonic()
    if rank == 0:
        models.export(model, tokenizer, folder / "model")
    if plan.ranks > 1:
        dist.destroy_process_group()


def _checkpoint(folder: Path, rank: int) -> Path:
    return folder / f"checkpoint-{rank}.pt"


def _resume(
    folder: Path, rank: int, model: LlamaForCausalLM, optimizer: SharedOptimizer
) -> tuple[float, int]:
    """Take up what a killed run saved; the seconds and steps it had, 0 if it saved nothing.

    Weights and time are the first rank's for all ranks: a run may be killed between two ranks' files, and
    weights of two steps would be those of no model. Momenta that are a little older do no harm; those of a
    run on another number of ranks fit nobody, and begin anew.
    """
    if not _checkpoint(folder, 0).exists():
        return 0.0, 0
    device = next(model.parameters()).device
    state = torch.load(_checkpoint(folder, 0), map_location=device, weights_only=False)
    model.load_state_dict(state["model"])
    own = _checkpoint(folder, rank)
    if own.exists():
        kept = torch.load(own, map_location=device, weights_only=False)
        if kept.get("ranks") == optimizer.ranks:  # as many others own other parameters
            optimizer.restore(kept["optimizer"])
    seconds: float = state["seconds"]
    step: int = state["step"]
    return seconds, step


def _save(path: Path, model: LlamaForCausalLM, optimizer: SharedOptimizer, seconds: float, step: int) -> None:
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state(),
        "ranks": optimizer.ranks,
        "seconds": seconds,
        "step": step,
    }
    torch.save(state, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def _log(folder: Path, record: dict[str, object]) -> None:
    with (folder / "log.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def run(plan: Plan) -> Path:
    """Train, or take up a killed run; returns the Hugging Face directory of the result."""
    folder = plan.out / plan.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rendezvous").unlink(missing_ok=True)
    if torch.cuda.is_available():
        plan = Plan(**{**plan.__dict__, "ranks": 1})
    if plan.ranks == 1:
        _worker(0, plan)
    else:
        workers.run(_worker, (plan,), plan.ranks)
    return folder / "model"
