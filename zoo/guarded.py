"""A training loop that nobody watches: for a budget of minutes, and going on after a divergence.

A step whose loss or gradient is not a number is left out. Where several are, or the loss has risen by much,
the weights go back to the last that were good, and go on at half the learning rates.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from zoo import clock
from zoo.optimizer import SharedOptimizer
from zoo.train import schedule

Batch = TypeVar("Batch")

#: Gradients of a larger norm are scaled down to it.
MOST_NORM = 1.0
#: Steps left out in a row, and nats above the least mean loss, that are a divergence.
MOST_LEFT_OUT, MOST_RISE = 3, 0.7
#: Goings back after which there is no use in another.
MOST_RETURNS = 6
_FADE = 0.95
_KEEP_SECONDS = 10.0
_LOG_SECONDS = 5.0


class Diverged(RuntimeError):
    """Training diverged again and again, at ever lower rates."""


@dataclass(frozen=True)
class Rates:
    """Peak learning rates: of matrices (Muon), and of all else (AdamW)."""

    matrices: float
    others: float


@dataclass
class Trained:
    """What came of it: steps, tokens, seconds; means of loss and figures over the last 20 steps or so."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = math.nan
    figures: tuple[float, ...] = ()
    left_out: int = 0
    returns: int = 0


def train(
    model: nn.Module,
    batches: Callable[[float], tuple[Batch, int]],
    loss_of: Callable[[Batch], tuple[Tensor, list[Tensor]]],
    rates: Rates,
    minutes: float,
    log: Path,
) -> Trained:
    """Step until the minutes are over, which the learning rates follow.

    Args:
        model: trained in place; its parameters are left as they are at the end.
        batches: the next batch and its tokens, at a share 0..1 of the budget.
        loss_of: a batch's loss, and figures to log (scalars).
        rates: at their peak.
        minutes: of ``clock.seconds``; at least one step is made.
        log: JSON lines, one each five seconds, which are also printed.

    Raises:
        Diverged: after ``MOST_RETURNS`` goings back.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = SharedOptimizer(model, rates.matrices, rates.others)
    good = [p.detach().clone() for p in parameters]
    found, least = Trained(), math.inf
    means: list[float] = []
    in_a_row = 0
    begun = clock.seconds()
    kept = logged = time.monotonic()
    while True:
        progress = min((clock.seconds() - begun) / (minutes * 60.0), 1.0)
        batch, num_tokens = batches(progress)
        loss, figures = loss_of(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, MOST_NORM)
        # The only wait for the device: one transfer a step, before the weights are touched.
        now = torch.stack([loss.detach(), norm, *(f.detach() for f in figures)]).float().tolist()
        found.steps += 1
        found.tokens += num_tokens
        found.seconds = clock.seconds() - begun
        progress = min(found.seconds / (minutes * 60.0), 1.0)
        if all(map(math.isfinite, now)):
            optimizer.step(schedule(progress))
            in_a_row = 0
            means = [_FADE * mean + (1.0 - _FADE) * new for mean, new in zip(means or now, now, strict=True)]
            found.loss, found.figures = means[0], tuple(means[2:])
        else:
            optimizer.forget_gradients()
            in_a_row += 1
            found.left_out += 1
        if in_a_row >= MOST_LEFT_OUT or (means and means[0] > least + MOST_RISE):
            found.returns += 1
            if found.returns > MOST_RETURNS:
                raise Diverged(f"{log.stem}: {found.returns} divergences, the last at step {found.steps}")
            _restore(parameters, good)
            rates = Rates(rates.matrices / 2, rates.others / 2)
            optimizer = SharedOptimizer(model, rates.matrices, rates.others)
            in_a_row, means, least = 0, [], math.inf
            _write(log, {"step": found.steps, "returned": found.returns, "matrix_lr": rates.matrices})
            continue
        least = min(least, means[0]) if means else least
        at = time.monotonic()
        if at - kept > _KEEP_SECONDS and means and means[0] < least + MOST_RISE / 4:
            good, kept = [p.detach().clone() for p in parameters], at
        if at - logged > _LOG_SECONDS or progress >= 1.0 or found.steps == 1:
            _write(log, _record(found, now[1]))
            logged = at
        if progress >= 1.0:
            return found


@torch.no_grad()
def _restore(parameters: list[nn.Parameter], good: list[Tensor]) -> None:
    for p, kept in zip(parameters, good, strict=True):
        p.copy_(kept)


def _record(found: Trained, norm: float) -> dict[str, object]:
    rate = found.tokens / max(found.seconds, 1e-9)
    return {
        "step": found.steps,
        "seconds": round(found.seconds, 1),
        "loss": round(found.loss, 4),
        "figures": [round(value, 4) for value in found.figures],
        "gradient_norm": round(norm, 3),
        "tokens_s": round(rate),
    }


def _write(log: Path, record: dict[str, object]) -> None:
    text = json.dumps(record)
    print(log.stem, text, flush=True)
    with log.open("a") as file:
        file.write(text + "\n")
