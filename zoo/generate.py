"""The target writes answers to training prompts; its distributions at each token come along for free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from zoo import clock, models
from zoo.corpus import DOMAINS
from zoo.dataset import Tokens
from zoo.registry import Domain
from zoo.scored import TOP, Scored, ScoredBuilder

#: Share of the generation time each domain gets.
TIME_SHARES: dict[Domain, float] = {"code": 0.4, "chat": 0.35, "summary": 0.25}
TEMPERATURE = 0.8
_MAX_NEW: dict[Domain, int] = {"code": 120, "chat": 96, "summary": 48}
#: A batch ends when fewer than this share of its rows are still writing; those are kept as they are, cut
#: short.
_STRAGGLERS = 0.08


#: Rows that have ended leave a batch when they are this share of it: seldom on a GPU, where a step of many
#: rows takes hardly longer than one of few, and keys and values would be copied each time.
_LEAVE_SHARE = {"cuda": 0.25}
#: Prompts of one batch differ by at most so many tokens in length.
_MOST_SPREAD = 16


def _top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The ``TOP`` most probable tokens of each row (int16) and their log-probabilities in nats (float16)."""
    values, ids = torch.log_softmax(logits.float(), -1).topk(TOP, -1)
    return ids.to(torch.int16), values.to(torch.float16)


def top_of(logits: Tensor) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.float16]]:
    """The ``TOP`` most probable tokens of each row and their log-probabilities in nats."""
    ids, values = _top(logits)
    return ids.cpu().numpy(), values.cpu().numpy()


@dataclass(frozen=True)
class Prompts:
    """A batch: ``ids`` is [prompts, longest], in a row a prompt of ``lengths`` tokens, then zeros."""

    ids: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


class Batcher:
    """Batches of training prompts of about equal length, at most 16 tokens apart; none is given out twice."""

    def __init__(self, tokens: Tokens, rng: np.random.Generator) -> None:
        self._tokens, self._rng = tokens, rng
        lengths = np.diff(tokens.starts)
        self._lengths = lengths - np.add.reduceat(tokens.answer.astype(np.int64), tokens.starts[:-1])
        shuffled = rng.permutation(len(tokens))
        ordered = shuffled[np.argsort(self._lengths[shuffled], kind="stable")]
        self._left = [ordered[tokens.domain[ordered] == d] for d in range(len(DOMAINS))]

    def take(self, domain: int, size: int) -> Prompts | None:
        """Up to ``size`` prompts, neighbours by length; lengths come in proportion to their prompts.

        ``None`` when all of the domain were given out.
        """
        left = self._left[domain]
        if not len(left):
            return None
        begin = int(self._rng.integers(max(len(left) - size, 0) + 1))
        within = self._lengths[left] <= self._lengths[left[begin]] + _MOST_SPREAD
        end = min(begin + size, int(np.flatnonzero(within)[-1]) + 1)
        members, self._left[domain] = left[begin:end], np.delete(left, slice(begin, end))
        sizes = self._lengths[members]
        ids = np.zeros((len(members), int(sizes.max())), np.int64)
        for row, (i, size_) in enumerate(zip(members, sizes, strict=True)):
            start = self._tokens.starts[i]
            ids[row, :size_] = self._tokens.ids[start : start + size_]
        return Prompts(ids, sizes)


@torch.inference_mode()
def continue_batch(
    model: LlamaForCausalLM,
    prompts: Tensor,
    temperatures: Tensor,
    end: int,
    most: int,
    stragglers: float = 0.0,
    lengths: Tensor | None = None,
) -> list[tuple[list[int], npt.NDArray[np.int16], npt.NDArray[np.float16]]]:
    """Answers to prompts with the distributions they were drawn from.

    All tensors lie on the model's device, and what is written stays there until the batch ends.

    Args:
        prompts: [rows, longest]; what lies behind a row's length is not read.
        temperatures: one a row, 0 for greedy.
        end: the token after which a row has ended.
        most: tokens of an answer.
        stragglers: the batch ends when at most this share of its rows are still writing.
        lengths: of the prompts, [rows]; all are as long as the longest if None. There is no padding: all rows
            begin with what the shortest have, and longer prompts go on with their own tokens.
    """
    count, longest = prompts.shape
    device = prompts.device
    if lengths is None:
        lengths = torch.full((count,), longest, device=device)
    shortest = int(lengths.min())
    cache = DynamicCache()
    rows = torch.arange(count, device=device)  # of the batch as it is now
    has_ended = torch.zeros(count, dtype=torch.bool, device=device)
    steps: list[tuple[Tensor, ...]] = []
    given = prompts[:, :shortest]
    leave_share = _LEAVE_SHARE.get(device.type, 0.0)
    for place in range(shortest, longest + most):
        hidden = model.model(given, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        logits = model.lm_head(hidden).float()
        gumbel = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))
        chosen = (logits + temperatures[rows, None] * gumbel).argmax(-1)
        is_answer = lengths[rows] <= place
        if place < longest:
            chosen = torch.where(is_answer, chosen, prompts[rows, place])
        steps.append((rows, is_answer & ~has_ended, chosen, *_top(logits)))
        has_ended = has_ended | (is_answer & ((chosen == end) | (place - lengths[rows] + 1 >= most)))
        num_left = len(rows) - int(has_ended.sum())
        if num_left <= stragglers * count:
            break
        if num_left < len(rows) and len(rows) - num_left >= leave_share * len(rows):
            keep = (~has_ended).nonzero().flatten()
            cache.batch_select_indices(keep)
            rows, chosen, has_ended = rows[keep], chosen[keep], has_ended[keep]
        given = chosen[:, None]
    return _by_row(steps, count)


def _by_row(
    steps: list[tuple[Tensor, ...]], count: int
) -> list[tuple[list[int], npt.NDArray[np.int16], npt.NDArray[np.float16]]]:
    """What the steps wrote, a row each: tokens, ids and log-probabilities."""
    rows, counts, chosen, ids, logp = (torch.cat(part).cpu().numpy() for part in zip(*steps, strict=True))
    order = np.flatnonzero(counts)
    order = order[np.argsort(rows[order], kind="stable")]
    ends = np.cumsum(np.bincount(rows[order], minlength=count))[:-1]
    parts = (np.split(part[order], ends) for part in (chosen, ids, logp))
    return [(answer.tolist(), i, p) for answer, i, p in zip(*parts, strict=True)]


def write(
    model: LlamaForCausalLM,
    tokens: Tokens,
    minutes: float,
    seed: int,
    batch: int,
    temperature: float = TEMPERATURE,
) -> Scored:
    """Answers to random prompts of ``tokens`` for a budget of minutes, at least a batch of each domain; half
    of them are greedy, half at ``temperature``.
    """
    torch.manual_seed(seed)
    device = next(model.parameters()).device
    end = model.config.eos_token_id
    assert isinstance(end, int)
    batcher = Batcher(tokens, np.random.default_rng(seed))
    builder = ScoredBuilder()
    spent: dict[Domain, float] = dict.fromkeys(DOMAINS, 0.0)
    begun = clock.seconds()
    while spent and (clock.seconds() - begun < minutes * 60.0 or not all(spent.values())):
        domain = min(spent, key=lambda d: spent[d] / TIME_SHARES[d])
        at = clock.seconds()
        taken = batcher.take(DOMAINS.index(domain), batch)
        if taken is None:
            del spent[domain]
            continue
        given, lengths = (torch.from_numpy(part).to(device) for part in (taken.ids, taken.lengths))
        temperatures = torch.arange(len(given), device=device) % 2 * temperature
        written = continue_batch(model, given, temperatures, end, _MAX_NEW[domain], _STRAGGLERS, lengths)
        for ids, length, (answer, top_ids, top_logp) in zip(taken.ids, taken.lengths, written, strict=True):
            if answer:
                builder.add(DOMAINS.index(domain), ids[:length].tolist(), answer, top_ids, top_logp)
        spent[domain] += clock.seconds() - at
    return builder.build()


def generate(model_dir: Path, tokens: Tokens, minutes: float, seed: int, batch: int = 128) -> Scored:
    """As ``write``, by the model in a directory."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # bfloat16 is half again as fast here, and its rounding is far below what a drafter can resolve.
    model = models.load(model_dir).to(torch.bfloat16).to(device)
    return write(model, tokens, minutes, seed, batch)


def write_answers(part: int, model_dir: Path, data: Path, minutes: float) -> None:
    """One process's answers to the training prompts in ``data``, in a file there; kept if it exists."""
    torch.set_num_threads(1)
    written = data / f"generated-{part}.npz"
    if not written.exists():
        generate(model_dir, Tokens.load(data / "train.npz"), minutes, seed=100 + part).save(written)
