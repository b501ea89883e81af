"""Put models into the shipped weights folder: from a training checkpoint, or untrained where there is none
yet.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from zoo import models
from zoo.tokenizer import load as load_tokenizer


def publish(name: str, data: Path, run: Path, weights: Path) -> None:
    """Write the named model with its tokenizer to ``weights/name``, from the newest checkpoint under
    ``run``.
    """
    tokenizer = load_tokenizer(data / "tokenizer")
    model = models.build(name, tokenizer)
    checkpoint = run / name / "checkpoint-0.pt"
    if checkpoint.exists():
        model.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=False)["model"])
    models.export(model, tokenizer, weights / name)


def total_bytes(weights: Path) -> int:
    """Size of everything under the weights folder."""
    return sum(path.stat().st_size for path in weights.rglob("*") if path.is_file())


def copy(name: str, run: Path, weights: Path) -> None:
    """Copy a finished model from its run to the weights folder."""
    shutil.copytree(run / name / "model", weights / name, dirs_exist_ok=True)
