"""Distil the drafters: the target's distributions on its own answers and on corpus text, for a budget of
minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from zoo import generate, models, retokenized, score, workers
from zoo.dataset import Tokens
from zoo.learning import learn
from zoo.optimizer import SharedOptimizer
from zoo.registry import DRAFTERS, LARGER_DRAFTER, OTHER_VOCABULARY, TARGET, Domain
from zoo.scored import Batch, Scored, batches
from zoo.tokenizer import load as load_tokenizer

#: What each drafter learns: shares of the response tokens. Specialists see a little of the rest.
DIETS: dict[str, dict[Domain, float]] = {
    "drafter-general-2x192": {"code": 0.4, "chat": 0.35, "summary": 0.25},
    "drafter-code-2x128": {"code": 0.9, "chat": 0.05, "summary": 0.05},
    "drafter-chat-2x128": {"code": 0.05, "chat": 0.9, "summary": 0.05},
    "drafter-summary-1x128": {"code": 0.04, "chat": 0.06, "summary": 0.9},
    "drafter-vocab1024-2x128": {"code": 0.4, "chat": 0.35, "summary": 0.25},
    LARGER_DRAFTER: {"code": 0.4, "chat": 0.35, "summary": 0.25},
}
#: Share of rows that are the target's own answers, which is what is drafted when serving; the rest is
#: corpus text.
OWN_SHARE = 0.65
#: Weight of the cross-entropy to the target's most probable token, which is what greedy acceptance asks for.
ARGMAX_WEIGHT = 0.3
LEARNING_RATE = 4e-3
#: Rows and their length in tokens of one step. Small, for many steps: a drafter learns for minutes only.
ROWS, LENGTH = 8, 256


@dataclass(frozen=True)
class Minutes:
    """Budgets of the three stages in minutes of processor time (``drafter`` is for one drafter)."""

    generate: float = 6.5
    score: float = 1.5
    drafter: float = 6.5


def divergence(logits: Tensor, top_ids: Tensor, top_logp: Tensor) -> Tensor:
    """Mean over positions of KL(target || drafter), nats, over the target's top tokens and one bucket for
    the rest.

    ``logits`` is [positions, vocabulary]; the other two are [positions, TOP].
    """
    logq = torch.log_softmax(logits, -1).gather(1, top_ids)
    p = top_logp.exp()
    rest_p = (1.0 - p.sum(-1)).clamp(min=1e-6)
    rest_q = (1.0 - logq.exp().sum(-1)).clamp(min=1e-6)
    return ((p * (top_logp - logq)).sum(-1) + rest_p * (rest_p.log() - rest_q.log())).mean()


def distillation_loss(
    model: LlamaForCausalLM, batch: Batch, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Training loss, and the share of positions where drafter and target have the same most probable
    token.
    """
    ids = torch.from_numpy(batch.ids).to(device)
    top_ids = torch.from_numpy(batch.top_ids).to(device)
    top_logp = torch.from_numpy(batch.top_logp).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        hidden = model.model(ids, use_cache=False).last_hidden_state.flatten(0, 1)
        # Logits of prompt positions are never needed; at this size they would be most of the work.
        logits = model.lm_head(hidden[torch.from_numpy(batch.where).to(device)])
    logits = logits.float()
    best = top_ids[:, 0]
    loss = divergence(logits, top_ids, top_logp) + ARGMAX_WEIGHT * torch.nn.functional.cross_entropy(
        logits, best
    )
    return loss, [(logits.argmax(-1) == best).float().mean()]


def mixed(own: Scored, corpus: Scored, name: str, rows: int) -> Iterator[Batch]:
    """Endless batches of the named drafter's diet, of the target's own answers and of corpus text."""
    rng = np.random.default_rng(11)
    streams = [batches(data, DIETS[name], rows, LENGTH, rng) for data in (own, corpus)]
    while True:
        yield next(streams[0 if rng.random() < OWN_SHARE else 1])


def distil(name: str, data: Path, out: Path, minutes: float, start: Path | None = None) -> None:
    """Train one drafter on the scored data in ``data`` and write its Hugging Face directory
    ``out/name/model``.

    ``start`` is the directory of a drafter to go on from, at half the learning rate; without it the weights
    are random but for the embeddings.
    """
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = out / name
    tokenizer = load_tokenizer(data / "tokenizer")
    if start is None:
        model, rate = models.build(name, tokenizer), LEARNING_RATE
        target = load_tokenizer(out / TARGET / "model").get_vocab()
        rows = [target.get(tokenizer.convert_ids_to_tokens(i), -1) for i in range(len(tokenizer))]
        models.project_embeddings(model, models.load(out / TARGET / "model"), rows)
    else:
        model, rate = models.load(start).train(), LEARNING_RATE / 2
    model = model.to(device)
    optimizer = SharedOptimizer(model, rate, rate)
    own = Scored.load(sorted(data.glob("generated-*.npz")))
    corpus = Scored.load(sorted(data.glob("scored-*.npz")))
    stream = mixed(own, corpus, name, ROWS * (16 if device.type == "cuda" else 1))
    learn(
        stream,
        lambda batch: distillation_loss(model, batch, device),
        optimizer,
        folder,
        minutes,
        window=50,
    )
    models.export(model, tokenizer, folder / "model")


def _teach(part: int, parts: int, data: Path, out: Path, minutes: Minutes) -> None:
    torch.set_num_threads(1)
    target, scored = out / TARGET / "model", data / f"scored-{part}.npz"
    generate.write_answers(part, target, data, minutes.generate)
    if not scored.exists():
        score.score(target, Tokens.load(data / "train.npz"), minutes.score, part, parts).save(scored)


def _queue(
    part: int,
    parts: int,
    names: tuple[str, ...],
    data: Path,
    out: Path,
    minutes: float,
    starts: Path | None,
) -> None:
    for name in names[part::parts]:
        if not (out / name / "model" / "model.safetensors").exists():
            own = retokenized.folder(data, name)
            distil(name, own, out, minutes, None if starts is None else starts / name)


def run(
    data: Path,
    out: Path,
    minutes: Minutes,
    processes: int = 2,
    names: tuple[str, ...] = DRAFTERS,
    starts: Path | None = None,
) -> None:
    """All stages; what exists already is kept, so a killed run goes on where it was.

    ``starts`` is the folder of finished drafters to go on from.
    """
    if torch.cuda.is_available():
        processes = 1
    workers.run(_teach, (processes, data, out, minutes), processes)
    for name in set(names) & set(OTHER_VOCABULARY):
        retokenized.prepare(data, name, None if starts is None else starts / name)
    workers.run(_queue, (processes, names, data, out, minutes.drafter, starts), processes)
