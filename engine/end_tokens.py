"""Tokens that end an answer, as the files of a model directory say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def end_tokens(directory: Path) -> list[int]:
    """Tokens that end an answer, ascending: those of the model, and the tokenizer's.

    The tokenizer's is found by its name in `tokenizer.json`.
    """
    ends = end_tokens_of_model(directory)
    name = _eos_name(directory)
    if name is not None and (token := _number_of(name, directory)) is not None:
        ends.add(token)
    return sorted(ends)


def end_tokens_of_model(directory: Path) -> set[int]:
    """The end tokens in `generation_config.json`, or else in `config.json`, as for Transformers' `generate`.

    Chat models often end a turn with another token than the tokenizer's.

    Raises:
        ValueError: naming the file in which they are no numbers.
    """
    return _of_model(directory / "generation_config.json") or _of_model(directory / "config.json")


def _of_model(file: Path) -> set[int]:
    settings = _read(file)
    found = settings.get("eos_token_id")
    if found is None:  # of a model that reads more than text
        found = (settings.get("text_config") or {}).get("eos_token_id")
    try:
        return {int(token) for token in (found if isinstance(found, list) else [found]) if token is not None}
    except (TypeError, ValueError):
        raise ValueError(
            f"`eos_token_id` in {file} is {found!r}: it must be the number of a token, or a list of them"
        ) from None


def _eos_name(directory: Path) -> str | None:
    """The token with which the tokenizer says a text ends."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read(directory / file).get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None


def _number_of(name: str, directory: Path) -> int | None:
    tokenizer = _read(directory / "tokenizer.json")
    for token in tokenizer.get("added_tokens") or ():
        if token["content"] == name:
            return int(token["id"])
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    found = vocabulary.get(name) if isinstance(vocabulary, dict) else None
    return None if found is None else int(found)


def _read(file: Path) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return settings
