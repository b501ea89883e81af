"""A Transformers model under llguidance's masks, token by token, with nothing in common with the verifier."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import apply_token_bitmask_inplace, fill_next_token_bitmask
from transformers import DynamicCache

from engine.constraint import Constraint, Thought


def grammar_of(constraint: Constraint) -> str:
    """In llguidance's notation, written down a second time."""
    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(constraint.text)
    if constraint.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(re.escape, json.loads(constraint.text))))
    if constraint.kind == "grammar":
        return LLMatcher.grammar_from_lark(constraint.text)
    space = "" if constraint.compact else " ?"
    return LLMatcher.grammar_from_json_schema(
        constraint.text or '{"type": "object"}',
        overrides={"whitespace_flexible": False, "item_separator": "," + space, "key_separator": ":" + space},
    )


def answer_in(constraint: Constraint, output: list[int]) -> list[int] | None:
    """What of an output the grammar is about; None within the thought before it."""
    thought = constraint.thought
    if thought is None:
        return output
    told = [thought.open_token, *output] if thought.is_open else output
    if told[:1] != [thought.open_token]:
        return output
    opened = -1  # where the first mark stood last
    for place, token in enumerate(told):
        if token == thought.open_token:
            opened = place
        elif token == thought.close_token and _is_header(told[opened + 1 : place], thought):
            return told[place + 1 :]
    return None


def _is_header(between: list[int], thought: Thought) -> bool:
    wanted = list(thought.header)
    # The second mark may stand within a header, of which it is a part then.
    return between[: len(wanted)] == wanted


def may_think(constraint: Constraint, output: list[int]) -> bool:
    """Whether a thought may begin here."""
    return constraint.thought is not None and not constraint.thought.is_open and not output


class MaskedReference:
    """Logits of the whole sequence, those of tokens that the grammar forbids at minus infinity."""

    def __init__(self, model: Any, tokenizer: Path, eos: int = 2) -> None:
        self._model, self._eos = model, eos
        self._tokens: list[int] = []
        self._keys: Any = None
        self._tokenizer = LLTokenizer(tokenizer.read_text(), eos_token=eos)

    def _forward(self, tokens: list[int]) -> torch.Tensor:
        """[1, vocab] after `tokens`; where they go on from those before, Transformers keeps their keys."""
        known = len(self._tokens)
        if self._keys is None or tokens[:known] != self._tokens or known == len(tokens):
            self._keys, known = DynamicCache(), 0
        found: torch.Tensor = self._model(
            torch.tensor([tokens[known:]]), past_key_values=self._keys, use_cache=True
        ).logits[0, -1:]
        self._tokens = tokens
        return found

    @torch.inference_mode()
    def logits(self, constraint: Constraint, prompt: list[int], output: list[int]) -> torch.Tensor:
        """float32 [1, vocab] after prompt and output, by a new matcher."""
        logits = self._forward([*prompt, *output]).float().clone()
        answer = answer_in(constraint, output)
        if answer is None:
            logits[0, self._eos] = -torch.inf
            return logits
        matcher = LLMatcher(self._tokenizer, grammar_of(constraint), log_level=0)
        assert matcher.consume_tokens(answer), matcher.get_error()
        mask = np.zeros((1, (self._tokenizer.vocab_size + 31) // 32), dtype=np.int32)
        fill_next_token_bitmask(matcher, mask)
        if may_think(constraint, output):
            assert constraint.thought is not None
            free = logits[0, constraint.thought.open_token].clone()
            apply_token_bitmask_inplace(logits.numpy(), mask)
            logits[0, constraint.thought.open_token] = free
            return logits
        apply_token_bitmask_inplace(logits.numpy(), mask)
        return logits
