"""A target and its drafter in one go, in minutes on a GPU: train, let the target write and read, distil.

The stages are those of the demo family, with its corpus and tokenizer, but each is one process that keeps its
results in memory. On a GPU nothing is saved before a model is done.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from zoo import distill, generate, models, score
from zoo.dataset import SHARES, Packer, Tokens
from zoo.guarded import Rates, Trained, train
from zoo.prefetch import prefetched
from zoo.registry import DOMAINS, LARGER_DRAFTER, LARGER_TARGET, Domain
from zoo.scored import Batch, Scored, batches
from zoo.tokenizer import load as load_tokenizer
from zoo.train import LONG_FROM, MATRIX_LR, OTHER_LR, held_out_loss, weighted_loss

#: Widths for which the demo family's learning rates were chosen: the target's, and a drafter's.
_TARGET_WIDTH, _DRAFTER_WIDTH = 384, 192
#: Minutes of greedy answers to held-out prompts, and the batches of them that agreement is measured on.
_CHECK_MINUTES, _CHECK_BATCHES = 0.05, 4


@dataclass(frozen=True)
class Sizes:
    """What is computed at once: rows of a step of training, prompts and texts of a batch."""

    target_rows: int
    drafter_rows: int
    prompts: int
    texts: int


_SIZES = {"cuda": Sizes(32, 64, 1024, 256), "cpu": Sizes(2, 8, 64, 32)}


@dataclass(frozen=True)
class Plan:
    """What to train, and for how many minutes each (of ``clock.seconds``).

    Attributes:
        data: made by ``prepare``.
        out: models go to ``out/NAME``, logs to ``out/logs/NAME.jsonl``, figures to ``out/pair.json``.
        target, drafter: names of shapes (``zoo.models``); the drafter's must have a diet (``zoo.distill``).
        minutes: of the target's training. teach_minutes: in which it writes answers. score_minutes: in which
            it reads corpus text. drafter_minutes: of distillation.
        length: tokens of a row of the target's training; the last tenth has rows of twice that.
    """

    data: Path
    out: Path
    target: str = LARGER_TARGET
    drafter: str = LARGER_DRAFTER
    minutes: float = 3.0
    teach_minutes: float = 0.9
    score_minutes: float = 0.25
    drafter_minutes: float = 0.75
    length: int = 512


def rates(matrices: float, others: float, width: int, known_width: int) -> Rates:
    """Rates that were chosen at ``known_width``, for another: Muon's so that an update's spectral norm stays
    as it was, since it is in proportion to the root of the width (Yang et al. 2023, arXiv:2310.17813),
    AdamW's by the width.
    """
    share = known_width / width
    return Rates(matrices * math.sqrt(share), others * share)


class _Rows:
    """Packed rows, twice as long in the last tenth, for which it is told the progress."""

    def __init__(self, packer: Packer, rows: int, length: int) -> None:
        self._packer, self._rows, self._length = packer, rows, length
        self.progress = 0.0

    def __iter__(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]]:
        while True:
            long = 2 if self.progress >= LONG_FROM else 1
            yield self._packer.rows(max(self._rows // long, 1), self._length * long)


def train_target(
    plan: Plan, tokenizer: PreTrainedTokenizerFast, device: torch.device
) -> tuple[Path, dict[str, Any]]:
    """The target's directory, and what its training came to."""
    model = models.build(plan.target, tokenizer)
    models.quieten_residuals(model)
    model = model.to(device)
    rows = _Rows(
        Packer(Tokens.load(plan.data / "train.npz"), SHARES, seed=0), _sizes(device).target_rows, plan.length
    )
    with prefetched(iter(rows)) as made:

        def take(progress: float) -> tuple[tuple[Tensor, Tensor], int]:
            rows.progress = progress
            ids, answer = next(made)
            return (torch.from_numpy(ids).to(device), torch.from_numpy(answer).to(device)), ids.size - len(
                ids
            )

        def loss_of(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, list[Tensor]]:
            loss, response = weighted_loss(model, *batch)
            return loss, [response]

        width = model.config.hidden_size
        trained = train(
            model,
            take,
            loss_of,
            rates(MATRIX_LR, OTHER_LR, width, _TARGET_WIDTH),
            plan.minutes,
            _log(plan, plan.target),
        )
    record = {**_record(model, trained), "response_loss": _only(trained.figures)}
    record["held_out_loss"] = held_out_loss(model.eval(), Tokens.load(plan.data / "held_out.npz"))
    models.export(model, tokenizer, plan.out / plan.target)
    return plan.out / plan.target, record


def train_drafter(
    plan: Plan, model: LlamaForCausalLM, own: Scored, corpus: Scored, device: torch.device
) -> dict[str, Any]:
    """Distil the drafter from what the target wrote and read; what that came to."""
    rows, width = _sizes(device).drafter_rows, model.config.hidden_size
    with prefetched(distill.mixed(own, corpus, plan.drafter, rows)) as made:

        def take(progress: float) -> tuple[Batch, int]:
            batch = next(made)
            return batch, batch.ids.size

        trained = train(
            model,
            take,
            lambda batch: distill.distillation_loss(model, batch, device),
            rates(distill.LEARNING_RATE, distill.LEARNING_RATE, width, _DRAFTER_WIDTH),
            plan.drafter_minutes,
            _log(plan, plan.drafter),
        )
    return {**_record(model, trained), "agreement_in_training": _only(trained.figures)}


@torch.no_grad()
def agreement(model: LlamaForCausalLM, scored: Scored, device: torch.device) -> dict[str, float]:
    """By domain, the share of response tokens at which the model's most probable token is the target's."""
    found: dict[str, float] = {}
    for d, domain in enumerate(DOMAINS):
        if bool((scored.tokens.domain == d).any()):
            only: dict[Domain, float] = {name: float(name == domain) for name in DOMAINS}
            stream = batches(scored, only, 8, distill.LENGTH, np.random.default_rng(0))
            drawn = (
                distill.distillation_loss(model, next(stream), device)[1][0] for _ in range(_CHECK_BATCHES)
            )
            found[domain] = float(torch.stack(list(drawn)).mean())
    return found


def run(plan: Plan) -> dict[str, Any]:
    """Every stage; the record, which is written to ``out/pair.json`` after each."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    if cuda:
        torch.set_num_threads(min(4, os.cpu_count() or 1))
        torch.set_float32_matmul_precision("high")  # TF32, where anything is multiplied in float32
        # On Hopper it would be preferred, and plan anew for every length that answers come to.
        torch.backends.cuda.enable_cudnn_sdp(False)
    (plan.out / "logs").mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "benchmark": "pair",
        "plan": {**asdict(plan), "data": str(plan.data), "out": str(plan.out)},
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "sizes": asdict(_sizes(device)),
        "seconds": {},
    }
    stages = _Stages(record, plan.out / "pair.json")
    tokenizer = load_tokenizer(plan.data / "tokenizer")
    directory, record["target"] = train_target(plan, tokenizer, device)
    stages.end("target")
    if cuda:
        torch.cuda.empty_cache()
    target = models.load(directory)
    drafter = models.build(plan.drafter, tokenizer)
    models.project_embeddings(drafter, target)
    # What is served is in bfloat16, too.
    target = target.to(torch.bfloat16).to(device)
    sizes = _sizes(device)
    tokens = Tokens.load(plan.data / "train.npz")
    stages.end("start of the drafter")
    own = generate.write(target, tokens, plan.teach_minutes, seed=100, batch=sizes.prompts)
    record["written_tokens"] = int(own.tokens.answer.sum())
    stages.end("writing")
    corpus = score.read(target, tokens, plan.score_minutes, 0, 1, sizes.texts)
    record["read_tokens"] = int(corpus.tokens.answer.sum())
    stages.end("reading")
    held_out = Tokens.load(plan.data / "held_out.npz")
    check = generate.write(
        target, held_out, _CHECK_MINUTES, seed=7, batch=min(sizes.prompts, 128), temperature=0.0
    )
    stages.end("answers to held-out prompts")
    del target
    drafter = drafter.to(device)
    record["drafter"] = train_drafter(plan, drafter, own, corpus, device)
    models.export(drafter, tokenizer, plan.out / plan.drafter)
    stages.end("drafter")
    record["agreement"] = agreement(drafter.eval(), check, device)
    stages.end("agreement")
    return record


class _Stages:
    """Times stages, and writes the record as each ends."""

    def __init__(self, record: dict[str, Any], file: Path) -> None:
        self._record, self._file, self._begun = record, file, time.monotonic()

    def end(self, name: str) -> None:
        """The stage of this name has ended."""
        took = time.monotonic() - self._begun
        self._record["seconds"][name] = round(took, 1)
        print(f"{name}: {took:.1f} s", flush=True)
        self._file.write_text(json.dumps(self._record, indent=1) + "\n", encoding="utf-8")
        self._begun = time.monotonic()


def _sizes(device: torch.device) -> Sizes:
    return _SIZES[device.type]


def _log(plan: Plan, name: str) -> Path:
    return plan.out / "logs" / f"{name}.jsonl"


def _only(figures: tuple[float, ...]) -> float | None:
    return figures[0] if figures else None


def _record(model: LlamaForCausalLM, trained: Trained) -> dict[str, Any]:
    record = asdict(trained)
    del record["figures"]
    return {
        **record,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_s": trained.tokens / trained.seconds,
    }
