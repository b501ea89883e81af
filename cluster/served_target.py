"""Which target a system serves, so that cells and answers of another one are told apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from cluster.config import TargetConfig
from cluster.metric_set import flotilla_version
from cluster.model_paths import adapter_directory, model_directory

#: Settings of a target by which clients and requests under way know it. Other weights at the same path are
#: not noticed.
FIELDS = ("path", "dtype", "quantization", "served_name")

#: Settings on which the last bits of logits depend besides the request. Drafters, policy and batching are
#: none of them: they change no token.
ROUNDING_FIELDS = ("path", "dtype", "quantization", "tensor_parallel", "runner", "attention")


def served_target(config: TargetConfig) -> str:
    """A short name of the target's text, the same for all whose texts can be gone on with."""
    described = json.dumps([*(getattr(config, field) for field in FIELDS), *_adapters(config)])
    return hashlib.sha256(described.encode()).hexdigest()[:12]


def system_fingerprint(config: TargetConfig) -> str:
    """OpenAI's field: as long as it is the same, so is the text of a request with a seed.

    Other weights at the same path, and another kind of processor, are not noticed.
    """
    described = json.dumps([*(getattr(config, field) for field in ROUNDING_FIELDS), *_adapters(config)])
    return f"flotilla-{flotilla_version()}-{hashlib.sha256(described.encode()).hexdigest()[:8]}"


def served_path(path: str, find: Callable[[str], Path] = model_directory) -> str:
    """A model's directory, where clients on this machine find its tokenizer; else as configured."""
    try:
        return str(find(path))
    except (FileNotFoundError, KeyError):
        return path


def served_adapters(config: TargetConfig) -> dict[str, str]:
    """Directories of the adapters, by their names."""
    return {adapter.name: served_path(adapter.path, adapter_directory) for adapter in config.adapters}


def _adapters(config: TargetConfig) -> list[list[str]]:
    """Names and paths: a request goes on only where its adapter is the same."""
    return [[adapter.name, adapter.path] for adapter in config.adapters]
