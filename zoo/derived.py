"""Writing a model that is made from another one's files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write_derived(
    source: Path, out: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
) -> int:
    """Write a model with that configuration and these weights, and with the other files of its source.

    Returns:
        Its parameters.

    Raises:
        FileExistsError: if `out` is there.
    """
    out.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name != "model.safetensors.index.json":
            shutil.copy(file, out / file.name)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(dict(weights), out / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.numel() for weight in weights.values())
