"""A tiny vocabulary for grammars, random constraints over it, and decoding under them with no verifier."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask

from engine.constraint import Constraint, Thought
from engine.grammar import Grammars
from engine.sampling import Row, TokenHistory, decide
from engine.sampling_params import RequestSpec, SamplingParams
from tests.masked_reference import answer_in, grammar_of, may_think
from tests.verifier.target import VOCAB, Target

END = 1
PIECES = [
    *'{}[]":,. -+0123456789abcdexyz',
    *[
        '{"',
        '":',
        '": ',
        '",',
        '", "',
        '"}',
        "true",
        "false",
        "null",
        "ab",
        "abc",
        "bc",
        "12",
        "00",
        "xy",
        "x,",
    ],
    *["e", "tru", "nul", "\\", "n", "r", "u", "l", "s", "f", "t"],
]


class _Pieces:
    """What llguidance asks of a tokenizer."""

    eos_token_id = END
    bos_token_id = 0
    special_token_ids = (0, END)
    tokens = (b"<s>", b"</s>", *dict.fromkeys(piece.encode() for piece in PIECES))

    def __call__(self, text: str | bytes) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        found = []
        while data:
            best = max((t for t in self.tokens if data.startswith(t)), key=len, default=b"")
            if not best:  # a character that this vocabulary does not have
                data = data[1:]
                continue
            found.append(self.tokens.index(best))
            data = data[len(best) :]
        return found


def tokenizer(ends: Sequence[int] = (END,)) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Pieces()), n_vocab=VOCAB, eos_token=list(ends))


def make_grammars() -> Grammars:
    return Grammars(tokenizer)


def text_of(tokens: list[int]) -> str:
    return b"".join(_Pieces.tokens[token] for token in tokens if token != END).decode()


def _schemas() -> st.SearchStrategy[dict[str, Any]]:
    leaf = st.sampled_from(
        [
            {"type": "integer", "minimum": 0, "maximum": 120},
            {"type": "boolean"},
            {"type": "null"},
            {"type": "string", "maxLength": 3},
            {"enum": ["a", "ab", "abc", 12]},
            {"type": "string", "pattern": "^x?y{1,2}$"},
            {"const": "xyz"},
        ]
    )

    def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        arrays = st.builds(
            lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers(0, 2)
        )
        objects = st.dictionaries(st.sampled_from(["a", "ab", "xy"]), inner, min_size=1, max_size=2).flatmap(
            lambda found: st.sets(st.sampled_from(sorted(found))).map(
                lambda required: {
                    "type": "object",
                    "properties": found,
                    "required": sorted(required),
                    "additionalProperties": False,
                }
            )
        )
        return arrays | objects | st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner)

    return st.recursive(leaf, deeper, max_leaves=4)


_patterns = st.recursive(
    st.sampled_from(["a", "b", "[a-c]", "12?", "xyz", "[0-9]{1,3}", "(ab|abc)", "x,"]),
    lambda inner: (
        st.builds("{}{}".format, inner, inner)
        | st.builds("({}|{})".format, inner, inner)
        | st.builds("({}){{0,3}}".format, inner)
        | st.builds("({})*".format, inner)
    ),
    max_leaves=4,
)

_forms = st.one_of(
    st.builds(
        lambda schema, compact: Constraint(kind="json_schema", text=json.dumps(schema), compact=compact),
        _schemas(),
        st.booleans(),
    ),
    st.builds(lambda pattern: Constraint(kind="regex", text=pattern), _patterns),
    st.builds(
        lambda found: Constraint(kind="choice", text=json.dumps(found)),
        st.lists(st.text('abcxyz.{}"', min_size=1, max_size=5), min_size=1, max_size=4),
    ),
    st.just(Constraint(kind="json_object")),
    st.just(Constraint(kind="grammar", text='start: "a" start "b" | "x" /[0-9]{2}/')),
)


thoughts = st.none() | st.builds(
    Thought,
    open_token=st.sampled_from([5, 12]),
    close_token=st.sampled_from([7, 9]),
    is_open=st.booleans(),
    header=st.sampled_from([(), (), (14,), (14, 15)]),
    ends=st.sampled_from([(), (END,)]),
)
constraints = st.builds(
    lambda form, thought: msgspec.structs.replace(form, thought=thought), _forms, thoughts
)


class Oracle:
    """Plain decoding: a new matcher for every token, its mask over the logits of the whole sequence."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._tokenizer = tokenizer()

    def mask(self, constraint: Constraint, output: list[int]) -> list[bool]:
        """Which tokens may follow `output`."""
        answer = answer_in(constraint, output)
        if answer is None:
            assert constraint.thought is not None
            barred = {END}.difference(constraint.thought.ends)
            return [token not in barred and token < self._tokenizer.vocab_size for token in range(VOCAB)]
        allowed = self._mask(grammar_of(constraint), answer)
        if may_think(constraint, output):
            assert constraint.thought is not None
            allowed[constraint.thought.open_token] = True
        return allowed

    def _mask(self, grammar: str, answer: list[int]) -> list[bool]:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        assert matcher.consume_tokens(answer), matcher.get_error()
        words = np.zeros((1, (VOCAB + 31) // 32), dtype=np.int32)
        fill_next_token_bitmask(matcher, words)
        assert not matcher.is_error(), matcher.get_error()
        return [bool(words[0, token // 32] >> (token % 32) & 1) for token in range(VOCAB)]

    def decode(self, spec: RequestSpec) -> tuple[list[int], list[float]]:
        """The output, and how far the best token was ahead of the second at every position."""
        params, prompt = spec.sampling, spec.tokens[: spec.prompt_len]
        assert params.constraint is not None
        output: list[int] = []
        gaps: list[float] = []
        while len(output) < params.max_tokens:
            mask = self.mask(params.constraint, output)
            early = len(output) < params.min_tokens
            if early and any(mask[t] for t in range(VOCAB) if t not in params.stop_token_ids):
                mask = [bit and token not in params.stop_token_ids for token, bit in enumerate(mask)]
            logits = self._target.logits(prompt + output).clone()
            logits[0, ~torch.tensor(mask)] = -torch.inf
            # The mask has said all there is to be said of minimum lengths.
            position = len(output)
            history = TokenHistory(prompt, output)
            rows = [Row(_without_minimum(params), position, history)]
            decision = decide(logits, rows)
            output.append(int(decision.tokens[0]))
            gaps.append(float(decision.gap[0]))
            if output[-1] in params.stop_token_ids:
                break
        return output, gaps


def _without_minimum(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, min_tokens=0, constraint=None)
