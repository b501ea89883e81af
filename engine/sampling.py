"""From logits to tokens for many rows at once: logit processing, then Gumbel-max (design, idea 2).

The order of the operations is vLLM's (`vllm/v1/sample/sampler.py`): grammar, allowed tokens, bad words,
min_tokens, logit bias, penalties (repetition, frequency, presence), temperature, min_p, top_k, top_p.
Verifier and drafters share this module, so that a draft is ranked by the same rule that decides the token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from engine.barring import allow_only_, bar_, ends_of_bad_words
from engine.best_tokens import highest_by_triton
from engine.decision import Decision
from engine.devices import to_device
from engine.noise import gumbel_noise
from engine.sampling_params import LEAST_DIVISOR, SamplingParams
from engine.token_masks import mask_out_
from engine.triton_sampling import shape_by_triton
from engine.triton_support import runs_triton
from engine.truncation import min_p_, top_k_, top_p_

_Number = TypeVar("_Number", int, float)
_Entries = tuple[NDArray[np.int64], NDArray[np.float32]]


class TokenHistory:
    """Which tokens a request has seen, and how often it generated each: what penalties depend on.

    Kept up to date token by token, so that a step costs the number of distinct tokens, not a pass over
    the whole text. Requests without penalties and bad words need none.

    Attributes:
        output: what it generated.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        self._counts: dict[int, int] = dict.fromkeys(prompt, 0)
        self._entries: _Entries | None = None
        self.output: list[int] = []
        self.extend(output)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append generated tokens."""
        for token in tokens:
            self._counts[token] = self._counts.get(token, 0) + 1
        self.output.extend(tokens)
        self._entries = None

    def entries(self, path: Sequence[int] = ()) -> _Entries:
        """Distinct tokens of prompt, output and `path`, and how often output and path hold each.

        Args:
            path: tokens generated after the history, along a path of a tree.

        Returns:
            (int64 [m] token ids, float32 [m] counts; 0 for a token of the prompt only).
        """
        if self._entries is None:
            size = len(self._counts)
            self._entries = (
                np.fromiter(self._counts.keys(), np.int64, size),
                np.fromiter(self._counts.values(), np.float32, size),
            )
        if not path:
            return self._entries
        on_path: dict[int, int] = {}
        for token in path:
            on_path[token] = on_path.get(token, 0) + 1
        ids, counts = self._entries
        new = [token for token in on_path if token not in self._counts]
        counts = np.concatenate((counts, np.zeros(len(new), np.float32)))
        ids = np.concatenate((ids, np.array(new, np.int64)))
        for token, count in on_path.items():
            counts[ids == token] += count
        return ids, counts


class Row(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One decision to take: the next token after a tree node, or after a sequence.

    Attributes:
        params: of the request.
        position: output position of the token to be decided; with `params.seed` it fixes the noise.
        history: tokens of the request up to and including the tree's root; needed with penalties and bad
            words only.
        path: tokens after the history, from the root (excluded) to the node.
        allowed: int32 [words], one bit per token, lowest bit first: what a grammar allows here. It has
            regard to `min_tokens` already, which gives way where only stop tokens are allowed.
    """

    params: SamplingParams
    position: int
    history: TokenHistory | None = None
    path: Sequence[int] = ()
    allowed: NDArray[np.int32] | None = None


def perturbed_scores(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Log-probability of every token after processing, plus the row's Gumbel noise unless it is greedy.

    The highest score is the token `decide` chooses; excluded tokens score -inf. Drafters rank children by
    it (Gumbel coupling).

    Args:
        logits: float32 [n, vocab], raw; left unchanged.
        rows: n descriptions.

    Returns:
        float32 [n, vocab].
    """
    scores = processed_logits(logits, rows).log_softmax(-1)
    return _add_noise(scores, rows, _asked(rows).sampled)


def decide(logits: torch.Tensor, rows: Sequence[Row]) -> Decision:
    """The next token of every row: argmax of the perturbed scores, ties to the lowest token id.

    A row's outcome depends on its own logits and description only, never on the other rows.

    Args:
        logits: float32 [n, vocab], raw; left unchanged.
        rows: n descriptions.
    """
    with torch.inference_mode():
        scores = processed_logits(logits, rows, perturbed=True)
        if runs_triton(logits.device):
            values, best_two = highest_by_triton(scores, 2)
            return Decision(tokens=best_two[:, 0], gap=values[:, 0] - values[:, 1])
        best, tokens = scores.max(dim=-1, keepdim=True)
        # Knock the winner out to find the runner-up: cheaper than topk(2).
        scores.scatter_(1, tokens, -math.inf)
        second = scores.amax(dim=-1, keepdim=True)
        if scores is logits:
            logits.scatter_(1, tokens, best)
    return Decision(tokens=tokens[:, 0], gap=(best - second)[:, 0])


def processed_logits(
    logits: torch.Tensor, rows: Sequence[Row], *, perturbed: bool = False, may_wait: bool = True
) -> torch.Tensor:
    """Logits after every operation, float32 [n, vocab]; excluded tokens are -inf.

    May return `logits` itself when there is nothing to do.

    Args:
        logits: float32 [n, vocab], raw; left unchanged.
        rows: n descriptions.
        perturbed: add the noise of the rows that are not greedy.
        may_wait: whether the host may wait for the device. If not, `top_p` is dearer where there is no
            Triton.
    """
    if len(rows) != len(logits):
        raise ValueError(f"{len(logits)} rows of logits but {len(rows)} descriptions")
    asked = _asked(rows)
    sampled = asked.sampled
    if sampled and runs_triton(logits.device):
        work = _adjusted(logits, rows, asked)
        params, positions = [row.params for row in rows], [row.position for row in rows]
        return shape_by_triton(work, params, positions, perturbed=perturbed, in_place=work is not logits)
    work = _adjusted(logits, rows, asked, copies=bool(sampled))
    if sampled:
        _truncate(work, rows, sampled, may_wait=may_wait)
    return _add_noise(work, rows, sampled) if perturbed else work


class _Asked(NamedTuple):
    """Which rows ask for what.

    Attributes:
        masked: by a grammar, and by which mask.
        barred, shifted, penalized: to be given to the functions of these names.
        sampled: not greedy.
    """

    masked: dict[int, NDArray[np.int32]]
    barred: list[int]
    shifted: list[int]
    penalized: list[int]
    sampled: list[int]


def _asked(rows: Sequence[Row]) -> _Asked:
    """In one pass: rows of a request are neighbours, and hundreds in a step."""
    asked = _Asked({}, [], [], [], [])
    params: SamplingParams | None = None
    is_plain = is_barred = is_shifted = is_penalized = is_sampled = False
    for i, row in enumerate(rows):
        if row.params is not params:
            params = row.params
            is_sampled = not params.is_greedy
            is_barred = bool(params.allowed_token_ids or params.bad_words)
            is_shifted, is_penalized = bool(params.logit_bias), params.has_penalties
            is_plain = not (is_barred or is_shifted or is_penalized or params.min_tokens)
        if is_sampled:
            asked.sampled.append(i)
        if row.allowed is not None:
            asked.masked[i] = row.allowed
        if is_plain:
            continue
        if is_barred:
            asked.barred.append(i)
        if is_shifted or row.position < params.min_tokens:
            asked.shifted.append(i)
        if is_penalized:
            asked.penalized.append(i)
    return asked


def _adjusted(
    logits: torch.Tensor, rows: Sequence[Row], asked: _Asked, *, copies: bool = False
) -> torch.Tensor:
    """What comes before the temperature, each on the rows that ask for it; a copy unless nothing applies."""
    masked = asked.masked
    if not (copies or masked or asked.barred or asked.shifted or asked.penalized):
        return logits
    work = logits.clone()
    if masked:
        mask_out_(work, list(masked), list(masked.values()))
    if asked.barred:
        _bar(work, rows, asked.barred)
    if asked.shifted:
        _mask_and_bias(work, rows, asked.shifted)
    if asked.penalized:
        _penalize(work, rows, asked.penalized)
    return work


def _bar(work: torch.Tensor, rows: Sequence[Row], which: list[int]) -> None:
    """Everything but the allowed tokens, and the ends of bad words, to -inf."""
    for i in which:
        params, history = rows[i].params, rows[i].history
        if params.allowed_token_ids:
            allow_only_(work, i, params.allowed_token_ids)
        if params.bad_words:
            if history is None:
                raise ValueError("a request with bad words needs its token history")
            bar_(work, i, ends_of_bad_words(params.bad_words, history.output, rows[i].path))


def _mask_and_bias(work: torch.Tensor, rows: Sequence[Row], which: list[int]) -> None:
    """Stop tokens before min_tokens to -inf, then the logit bias; ids outside the vocabulary are ignored."""
    vocab = work.shape[1]
    index: list[tuple[int, int]] = []
    shift: list[float] = []
    for i in which:
        params = rows[i].params
        for token, bias in params.logit_bias.items():
            if 0 <= token < vocab:
                index.append((i, token))
                shift.append(bias)
        if rows[i].position < params.min_tokens and rows[i].allowed is None:
            for token in dict.fromkeys(params.stop_token_ids):
                if 0 <= token < vocab:
                    index.append((i, token))
                    shift.append(-math.inf)
    if index:
        row, token_id = to_device(torch.tensor(index), work.device).unbind(1)
        values = _column(shift, work, work.dtype)
        work.index_put_((row, token_id), values, accumulate=True)


def _penalize(work: torch.Tensor, rows: Sequence[Row], which: list[int]) -> None:
    """Repetition (CTRL, arXiv 1909.05858), frequency and presence penalties (OpenAI), in vLLM's order."""
    ids: list[NDArray[np.int64]] = []
    counts: list[NDArray[np.float32]] = []
    for i in which:
        history = rows[i].history
        if history is None:
            raise ValueError("a request with penalties needs its token history")
        row_ids, row_counts = history.entries(rows[i].path)
        ids.append(row_ids)
        counts.append(row_counts)
    lengths = [len(row_ids) for row_ids in ids]
    row = to_device(torch.from_numpy(np.repeat(np.array(which), lengths)), work.device)
    token = to_device(torch.from_numpy(np.concatenate(ids)), work.device)
    count = to_device(torch.from_numpy(np.concatenate(counts)), work.device)

    def per_entry(value: Callable[[SamplingParams], float]) -> torch.Tensor:
        values = np.array([value(rows[i].params) for i in which], dtype=np.float32)
        return to_device(torch.from_numpy(np.repeat(values, lengths)), work.device)

    repetition = per_entry(lambda params: max(params.repetition_penalty, LEAST_DIVISOR))
    frequency = per_entry(lambda params: params.frequency_penalty)
    presence = per_entry(lambda params: params.presence_penalty)
    value = work[row, token]
    value = torch.where(value > 0, value / repetition, value * repetition)
    value -= frequency * count
    value -= presence * (count > 0)
    work.index_put_((row, token), value)


def _truncate(work: torch.Tensor, rows: Sequence[Row], sampled: list[int], *, may_wait: bool) -> None:
    """Temperature, min_p, top_k and top_p of the sampled rows."""
    vocab = work.shape[1]
    params = [rows[i].params for i in sampled]
    which = None if len(sampled) == len(rows) else _column(sampled, work, torch.int64)
    part = work if which is None else work.index_select(0, which)
    # Subtracting the maximum first keeps tiny temperatures from overflowing to inf - inf.
    part -= part.amax(dim=-1, keepdim=True)
    part /= _column([max(p.temperature, LEAST_DIVISOR) for p in params], work).unsqueeze(1)
    _apply(part, min_p_, [p.min_p for p in params], [p.min_p > 0.0 for p in params])
    _apply(part, top_k_, [p.top_k for p in params], [0 < p.top_k < vocab for p in params])
    _apply(
        part, partial(top_p_, may_wait=may_wait), [p.top_p for p in params], [p.top_p < 1.0 for p in params]
    )
    if which is not None:
        work.index_copy_(0, which, part)


def _apply(
    part: torch.Tensor,
    operation: Callable[[torch.Tensor, Sequence[_Number]], None],
    values: Sequence[_Number],
    needed: Sequence[bool],
) -> None:
    """Run an in-place operation on the rows that need it."""
    which = [j for j, need in enumerate(needed) if need]
    if len(which) == len(values):
        operation(part, values)
    elif which:
        index = _column(which, part, torch.int64)
        some = part.index_select(0, index)
        operation(some, [values[j] for j in which])
        part.index_copy_(0, index, some)


def _add_noise(scores: torch.Tensor, rows: Sequence[Row], sampled: list[int]) -> torch.Tensor:
    """Add each sampled row's noise in place; rows of one request and position share its computation."""
    if not sampled:
        return scores
    keys = [(rows[i].params.seed, rows[i].position) for i in sampled]
    distinct = {key: j for j, key in enumerate(dict.fromkeys(keys))}
    noise = gumbel_noise(
        [seed for seed, _ in distinct],
        [position for _, position in distinct],
        scores.shape[1],
        device=scores.device,
    )
    if len(distinct) < len(keys):
        noise = noise.index_select(0, _column([distinct[key] for key in keys], scores, torch.int64))
    if len(sampled) == len(rows):
        return scores.add_(noise)
    return scores.index_add_(0, _column(sampled, scores, torch.int64), noise)


def _column(values: Sequence[float], like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return to_device(torch.tensor(values, dtype=dtype), like.device)
