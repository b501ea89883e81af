"""Proof that a differing output is a near tie: the target's own scores at the first difference.

Rounding differs with the shape of a batch, so two correct runs may choose differently where two tokens
score almost alike. That must be shown, not assumed: the reference recomputes the scores there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from benchmarks.engine_under_test import until_end
from benchmarks.transformers_engine import Reference
from engine.grammar import GrammarError
from engine.mask_bits import TokenMask
from engine.sampling import Row, TokenHistory, decide, processed_logits
from engine.sampling_params import SamplingParams
from engine.thoughtful_grammar import matcher_of

# Scores closer than this are a near tie in float32 (issue 2).
TOLERANCE = 1e-4
# In types of fewer digits rounding decides between logits at most so many units in the last place apart
# (docs/gpu.md, "Near ties").
_UNITS = 2
# How far rounding may move the edge of top-p, as a share of that: probabilities are sums over the vocabulary.
_EDGE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Difference:
    """A first difference between an output and the one expected.

    Attributes:
        prompt: index of the prompt, and `domain` its class.
        position: output position of the first difference.
        expected, found: the tokens there; -1 where an output had ended.
        gap: how much the reference scores its choice above the other token; infinite if the other token
            is excluded.
        at_edge: whether the other token wins when top-p, min-p or top-k move by less than rounding does.
        proven: whether this is a near tie, and all that was found after it is the target's choice, or near.
        text: the text before it, its end only.
    """

    prompt: int
    domain: str
    position: int
    expected: int
    found: int
    gap: float
    at_edge: bool
    proven: bool
    text: str


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int:
    """The first position at which the outputs differ (one may have ended there)."""
    shared = min(len(expected), len(found))
    return next((place for place in range(shared) if expected[place] != found[place]), shared)


def tolerance_of(reference: Reference, params: SamplingParams, logits: torch.Tensor) -> float:
    """The largest gap between scores at which rounding may decide, for targets computed as the reference.

    Args:
        reference: in the type of the target that is judged.
        params: of the request.
        logits: of the decision, before they are processed, [1, vocabulary].
    """
    if reference.dtype == "float32":
        return TOLERANCE
    largest = float(logits[logits.isfinite()].abs().max())
    # `frexp` counts from a half up to one, and `eps` is the unit from one on.
    unit = math.ldexp(torch.finfo(getattr(torch, reference.dtype)).eps, math.frexp(largest)[1] - 1)
    return _UNITS * unit / (1.0 if params.is_greedy else params.temperature)


def rows_for(
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    first: int = 0,
    allowed: Sequence[TokenMask | None] | None = None,
) -> list[Row]:
    """The decisions about `output` from position `first` on, and the one after its end.

    Args:
        params: of the request.
        prompt: before the output.
        output: generated.
        first: position of the first decision wanted.
        allowed: what a grammar allows at every position, if there is one (`masks_for`).
    """
    history = TokenHistory(prompt) if params.has_penalties else None
    masks = allowed or [None] * (len(output) + 1)
    return [
        Row(params, position, history, output[:position] if history is not None else (), masks[position])
        for position in range(first, len(output) + 1)
    ]


def masks_for(
    reference: Reference, params: SamplingParams, output: Sequence[int]
) -> list[TokenMask | None] | None:
    """What the grammar of a request with a constraint allows at every position of `output` and after it."""
    if params.constraint is None:
        return None
    return [
        matcher_of(reference.grammars, params.constraint, output[:position]).allowed()
        for position in range(len(output) + 1)
    ]


@torch.inference_mode()
def last_logits(reference: Reference, tokens: Sequence[int], count: int) -> torch.Tensor:
    """Logits after each of the last `count` tokens, float32 [count, vocabulary]."""
    logits: torch.Tensor = reference.model(
        input_ids=torch.tensor([list(tokens)], device=reference.device)
    ).logits.cpu()
    return logits[0, -count:].float()


def explain(
    reference: Reference,
    params: SamplingParams,
    prompt: Sequence[int],
    expected: Sequence[int],
    found: Sequence[int],
    *,
    index: int,
    domain: str,
    tolerance: float | None = None,
) -> Difference:
    """Recompute the scores where two outputs part, and say whether rounding alone explains it.

    Gaps up to `tolerance` are near ties; up to what `tolerance_of` says if it is None.
    """
    position = first_difference(expected, found)
    common = list(expected[:position])
    one = expected[position] if position < len(expected) else -1
    other = found[position] if position < len(found) else -1
    gap, is_near, at_edge, is_followed = math.inf, False, False, False
    if one >= 0 and other >= 0:
        logits = last_logits(reference, [*prompt, *common], 1)
        masks = masks_for(reference, params, common)
        row = rows_for(params, prompt, common, position, masks)
        gap, is_near, at_edge = _parting(reference, logits, row, (one, other), tolerance)
        is_followed = _follows(reference, params, prompt, found, position + 1, tolerance)
    return Difference(
        prompt=index,
        domain=domain,
        position=position,
        expected=one,
        found=other,
        gap=gap,
        at_edge=at_edge,
        proven=(is_near or at_edge) and is_followed,
        text=reference.decode(common)[-60:],
    )


def _parting(
    reference: Reference,
    logits: torch.Tensor,
    row: list[Row],
    pair: tuple[int, int],
    tolerance: float | None,
) -> tuple[float, bool, bool]:
    """The gap of the pair, whether it is near, and whether moving an edge of truncation decides."""
    if tolerance is None:
        tolerance = tolerance_of(reference, row[0].params, logits)
    settled, at_edge = int(decide(logits, row).tokens[0]), False
    for params in _moved_edges(logits, row, tolerance):
        moved = msgspec.structs.replace(row[0], params=params)
        at_edge |= {int(decide(logits, [moved]).tokens[0]), settled} == set(pair)
    gap = score_gap(logits, row, pair)
    return gap, gap <= tolerance, at_edge


def _moved_edges(logits: torch.Tensor, row: list[Row], tolerance: float) -> Iterator[SamplingParams]:
    """What is asked for, with each edge of truncation where rounding might put it."""
    params, change, edge = row[0].params, msgspec.structs.replace, _EDGE_SHARE * tolerance
    if params.is_greedy:
        return
    if params.top_p < 1.0:
        yield change(params, top_p=max(edge, params.top_p - edge))
        yield change(params, top_p=min(1.0, params.top_p + edge))
    if params.min_p > 0.0:  # a distance from the best score, in logits
        yield change(params, min_p=params.min_p * math.exp(-tolerance))
        yield change(params, min_p=min(1.0, params.min_p * math.exp(tolerance)))
    if 0 < params.top_k < logits.shape[-1]:
        all_of_them = msgspec.structs.replace(row[0], params=change(params, top_k=0, top_p=1.0))
        best = processed_logits(logits, [all_of_them])[0].topk(params.top_k + 1).values
        if float(best[-2] - best[-1]) <= tolerance:
            yield change(params, top_k=params.top_k + 1)
        if params.top_k > 1 and float(best[-3] - best[-2]) <= tolerance:
            yield change(params, top_k=params.top_k - 1)


def _follows(
    reference: Reference,
    params: SamplingParams,
    prompt: Sequence[int],
    found: Sequence[int],
    first: int,
    tolerance: float | None,
) -> bool:
    """Whether from a position on every token is what the target decides after those before it, or a near tie.

    Two outputs that part at a near tie have different texts from there on, so the other one says nothing of
    what follows.
    """
    if first >= len(found):
        return True
    body = list(found[:-1])
    try:
        masks = masks_for(reference, params, body)
    except GrammarError:  # what was found is not in the grammar
        return False
    logits = last_logits(reference, [*prompt, *body], len(found) - first)
    rows = rows_for(params, prompt, body, first, masks)
    decided: list[int] = decide(logits, rows).tokens.tolist()
    for place, (one, other) in enumerate(zip(decided, found[first:], strict=True)):
        if one != other:
            at = slice(place, place + 1)
            _, is_near, at_edge = _parting(reference, logits[at], rows[at], (one, other), tolerance)
            if not (is_near or at_edge):
                return False
    return True


def score_gap(logits: torch.Tensor, row: list[Row], pair: tuple[int, int]) -> float:
    """The most that either token of the pair lags behind the best score; infinite if one is excluded."""
    params = row[0].params
    scores = processed_logits(logits, row)
    if not params.is_greedy:
        from engine.noise import gumbel_noise

        scores = scores + gumbel_noise([params.seed], [row[0].position], scores.shape[1])
    best = float(scores.max())
    return max(best - float(scores[0, token]) for token in pair)


def audit(
    reference: Reference,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    max_tokens: int | None = None,
    end_tokens: Sequence[int] = (),
) -> list[int]:
    """What the target alone decides at every position of an output, given the output before it.

    One forward pass for the whole output: equal to it everywhere means the target alone generates it. With
    `max_tokens` this holds for its length, too: what ended before that without an end token gets the token
    that should have come next, and what went on after one is cut.
    """
    is_open = max_tokens is not None and len(output) < max_tokens and not set(output[-1:]) & set(end_tokens)
    body = list(output if is_open else output[:-1])
    logits = last_logits(reference, [*prompt, *body], len(body) + 1)
    masks = masks_for(reference, params, body)
    tokens: list[int] = decide(logits, rows_for(params, prompt, body, allowed=masks)).tokens.tolist()
    return tokens if max_tokens is None else until_end(tokens, max_tokens, end_tokens)
