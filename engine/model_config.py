"""Configurations of model directories, and what of one keeps its model from being loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from engine.error_text import is_own, text_of
from engine.model_files import BrokenFiles, read_json
from engine.unsupported_model import UnsupportedModel


def read_config(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The Transformers configuration of a directory, of which it can build a causal language model.

    Args:
        directory: Hugging Face model directory.
        trust_remote_code: run Python code that the directory names.

    Raises:
        UnsupportedModel: if there is none.
    """
    with refused(directory):
        try:
            config = AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except (ValueError, KeyError) as error:
            # Its message is an advice, or a list of all types.
            unknown = _why_unknown(directory)
            if unknown is None:
                raise
            raise UnsupportedModel(unknown) from error
    of_code = getattr(config, "auto_map", None) or {}
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not (
        trust_remote_code and "AutoModelForCausalLM" in of_code
    ):
        raise UnsupportedModel(
            f"`model_type` {config.model_type!r} in {directory / 'config.json'} is no causal language model "
            f"that Transformers ({transformers.__version__}) can build (e.g. multimodal or encoder): choose "
            "a model that only writes text"
        )
    return config


def _why_unknown(directory: Path) -> str | None:
    """How a configuration names no type of model that there is; None if it does."""
    file = directory / "config.json"
    try:
        described = read_json(file)
    except BrokenFiles as error:
        return str(error)
    if described.get("auto_map"):  # its own code knows
        return None
    model_type = described.get("model_type")
    if model_type is None:
        return f"{file} names no `model_type`, by which Transformers knows what to build"
    if model_type in transformers.CONFIG_MAPPING:
        return None
    return (
        f"this Transformers ({transformers.__version__}) does not know `model_type` {model_type!r} in "
        f"{file}: a model that is newer than it needs a newer one"
    )


@contextmanager
def refused(directory: Path) -> Iterator[None]:
    """Refuse the model, and say why in a line, if Transformers fails within.

    Args:
        directory: of the model.

    Raises:
        UnsupportedModel: for every error but those of memory and our own.
    """
    try:
        yield
    except (MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        # Any class: values of a configuration lead to whatever they lead to in Transformers' code, such as a
        # division by zero or an attribute that is missing.
        if is_own(error) or "can't allocate memory" in str(error):
            raise
        file, reason = directory / "config.json", _reason(directory, error)
        raise UnsupportedModel(f"cannot load the model that {file} describes: {reason}") from error


def _reason(directory: Path, error: Exception) -> str:
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        fields = sorted(set(_fields_of(directory, error.args[0])))
        if fields:
            return (
                f"{error.args[0]!r} in {' and '.join(f'`{field}`' for field in fields)} is not known to this "
                f"Transformers ({transformers.__version__})"
            )
    text = text_of(error)
    name = type(error).__name__
    # What Python itself raises is no answer to a wrong value: its class says what happened.
    tells = type(error).__module__ != "builtins" or isinstance(error, OSError | ValueError | ImportError)
    return text if tells or text.startswith(name) else f"{name}: {text}"


def _fields_of(directory: Path, value: str) -> Iterator[str]:
    """Fields of `config.json`, by the way to them, with this value."""
    try:
        yield from _with_value(json.loads((directory / "config.json").read_text(encoding="utf-8")), value, "")
    except (OSError, ValueError):
        return


def _with_value(found: Any, value: str, path: str) -> Iterator[str]:
    if found == value:
        yield path
    elif isinstance(found, dict):
        for name, inner in found.items():
            yield from _with_value(inner, value, f"{path}.{name}" if path else str(name))
