"""The training loop of what learns from the target: for a budget of minutes, with a log."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from zoo import clock
from zoo.optimizer import SharedOptimizer
from zoo.train import schedule

Batch = TypeVar("Batch")


def learn(
    batches: Iterable[Batch],
    loss_of: Callable[[Batch], tuple[Tensor, Sequence[float | Tensor]]],
    optimizer: SharedOptimizer,
    folder: Path,
    minutes: float,
    *,
    window: int,
) -> None:
    """Step until the minutes are over, which the learning rate follows.

    Args:
        batches: endless.
        loss_of: a batch's loss, and shares of its rows whose most probable token is the target's.
        optimizer: of what is trained.
        folder: made if it is not there; ``log.jsonl`` in it gets means over about ``window`` steps, twice in
            each.
        minutes: of ``clock.seconds``.
        window: see above.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.jsonl"
    log.unlink(missing_ok=True)  # an earlier run's steps are no part of this one
    begun, fade = clock.seconds(), 1.0 - 1.0 / window
    means: list[float] = []
    for step, batch in enumerate(batches, 1):
        loss, agreement = loss_of(batch)
        loss.backward()
        progress = min((clock.seconds() - begun) / (minutes * 60.0), 1.0)
        optimizer.step(schedule(progress))
        now = [float(loss.detach()), *map(float, agreement)]
        means = [fade * mean + (1.0 - fade) * new for mean, new in zip(means or now, now, strict=True)]
        if step % (window // 2) == 0 or progress >= 1.0:
            record = {"step": step, "seconds": round(clock.seconds() - begun), "loss": round(means[0], 4)}
            with log.open("a") as file:
                file.write(json.dumps({**record, "agreement": [round(a, 4) for a in means[1:]]}) + "\n")
        if progress >= 1.0:
            return
