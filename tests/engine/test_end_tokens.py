"""Tokens that end an answer: the same for the front end, which stops there, and for grammars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deployments.text_codec import TextCodec
from engine.end_tokens import end_tokens
from engine.grammar import load_tokenizer
from tests.fakes.tiny_tokenizer import tokenizer

END = tokenizer().eos_token_id  # <|end|>
PAD, BOS, USER = 0, 1, 4


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": USER}, None, {USER, END}),  # models without a generation_config.json
        ({"eos_token_id": [USER, PAD]}, {"temperature": 0.6}, {USER, PAD, END}),
        ({"text_config": {"eos_token_id": USER}}, None, {USER, END}),
        # A generation_config.json says it all: Transformers does not look further, either.
        ({"eos_token_id": PAD}, {"eos_token_id": [USER, BOS]}, {USER, BOS, END}),
        ({}, None, {END}),
        ({"eos_token_id": None}, {"eos_token_id": None}, {END}),
    ],
)
def test_end_tokens_are_those_of_model_and_tokenizer(
    config: dict[str, Any], generation: dict[str, Any] | None, ends: set[int], tmp_path: Path
) -> None:
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert TextCodec.load(tmp_path).eos_ids == ends
    assert end_tokens(tmp_path) == sorted(ends)
    assert set(load_tokenizer(tmp_path, len(tokenizer())).eos_tokens) == ends
