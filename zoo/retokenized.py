"""Training data for a drafter of another vocabulary: the target's tokens and distributions, respelled.

A target token is spelled by one or more tokens of the smaller vocabulary. The target's distribution over its
own next token is then also one over the next *small* token: that of a small token is the sum over the target
tokens whose spelling goes on with it, given what was spelled of the current target token so far.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from zoo import tokenizer
from zoo.dataset import Tokens
from zoo.registry import OTHER_VOCABULARY
from zoo.scored import TOP, Scored

#: Entries of each drafter's own vocabulary.
SIZES: dict[str, int] = {"drafter-vocab1024-2x128": 1024}
#: Corpus examples the merges are learned from.
_EXAMPLES = 20_000
_ROWS = 4096  # respelled at once: bounds the memory of one dense block

Spelling = npt.NDArray[np.int16]


def folder(data: Path, name: str) -> Path:
    """Where the data of the named drafter lies: that of its own vocabulary, or the family's."""
    return data / f"retokenized-{name}" if name in OTHER_VOCABULARY else data


def prepare(data: Path, name: str, start: Path | None = None) -> None:
    """Learn the drafter's tokenizer from the corpus in ``data`` and respell everything the target wrote and
    read.

    ``start`` is the directory of a finished drafter whose tokenizer is kept. What exists is left alone.
    """
    target, own = tokenizer.load(data / "tokenizer"), folder(data, name)
    own.mkdir(parents=True, exist_ok=True)
    if not (own / "tokenizer").exists():
        if start is not None:
            learned = tokenizer.load(start)
        else:
            learned = tokenizer.train(_texts(Tokens.load(data / "train.npz"), target), vocabulary=SIZES[name])
        learned.save_pretrained(str(own / "learning"))
        shutil.move(own / "learning", own / "tokenizer")
    table = spellings(target, tokenizer.load(own / "tokenizer"))
    for path in (*sorted(data.glob("generated-*.npz")), *sorted(data.glob("scored-*.npz"))):
        if not (own / path.name).exists():
            respell(Scored.load([path]), table, SIZES[name]).save(own / path.name)


def _texts(tokens: Tokens, target: PreTrainedTokenizerFast) -> Iterator[str]:
    for i in np.random.default_rng(3).permutation(len(tokens))[:_EXAMPLES]:
        text: str = target.decode(
            tokens.ids[tokens.starts[i] : tokens.starts[i + 1]].tolist(), skip_special_tokens=True
        )
        yield text


def spellings(target: PreTrainedTokenizerFast, small: PreTrainedTokenizerFast) -> Spelling:
    """int16 [target's vocabulary, longest spelling]: the small tokens of each target token, -1 behind them.

    Both are byte-level, so that pieces of characters are spelled too; special tokens keep their names.
    """
    ids = small.get_vocab()
    model = small.backend_tokenizer.model
    rows: list[list[int]] = [[] for _ in range(len(target))]
    for token, number in target.get_vocab().items():
        same = ids.get(token)
        rows[number] = [same] if same is not None else [piece.id for piece in model.tokenize(token)]
    table = np.full((len(rows), max(map(len, rows))), -1, np.int16)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    return table


def respell(scored: Scored, table: Spelling, size: int) -> Scored:
    """The same sequences and distributions in the small vocabulary of ``size`` entries."""
    tokens = scored.tokens
    lengths = (table >= 0).sum(1)
    of_token = lengths[tokens.ids]
    ends = np.concatenate([[0], np.cumsum(of_token)]).astype(np.int64)
    spelled = table[tokens.ids]
    ids = spelled[spelled >= 0].astype(np.int16)
    respelled = Tokens(ids, np.repeat(tokens.answer, of_token), ends[tokens.starts], tokens.domain)
    actual = tokens.ids[tokens.answer > 0]
    count = lengths[actual]
    row = np.repeat(np.arange(len(actual)), count)
    place = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    top_ids = np.empty((len(row), TOP), np.int16)
    top_logp = np.empty((len(row), TOP), np.float16)
    spelling = torch.from_numpy(table.astype(np.int64))
    for begin in range(0, len(row), _ROWS):
        part = slice(begin, begin + _ROWS)
        which, at = row[part], torch.from_numpy(place[part])
        best, token = _marginal(
            spelling,
            torch.from_numpy(actual[which].astype(np.int64)),
            at,
            torch.from_numpy(scored.top_ids[which].astype(np.int64)),
            torch.from_numpy(scored.top_logp[which].astype(np.float32)).exp(),
            size,
        )
        top_logp[part], top_ids[part] = best.numpy(), token.numpy()
    return Scored(respelled, top_ids, top_logp)


def _marginal(
    spelling: Tensor, actual: Tensor, place: Tensor, top_ids: Tensor, p: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and tokens of the ``TOP`` best small tokens at ``place`` of the spelling of
    ``actual``, a row each.
    """
    fits = torch.ones_like(p, dtype=torch.bool)
    for before in range(int(place.max())):
        same = spelling[top_ids, before] == spelling[actual, before][:, None]
        fits &= same | (place <= before)[:, None]
    token = spelling[top_ids].gather(2, place[:, None, None].expand(-1, TOP, 1)).squeeze(2)
    p = torch.where(fits & (token >= 0), p, 0.0)
    dense = torch.zeros(len(p), size).scatter_add_(1, token.clamp(min=0), p)
    inner = place > 0
    # What is spelled of the token so far is given; the tail outside the target's top is left out then.
    total = torch.where(inner, dense.sum(1), 1.0)[:, None]
    unseen = total <= 0.0  # an improbable token was drawn: all that is known of it is itself
    truth = spelling[actual, place][:, None]
    dense = torch.where(unseen, torch.zeros_like(dense).scatter_(1, truth, 1.0), dense)
    best, token = (dense / torch.where(unseen, 1.0, total)).clamp(min=1e-6, max=1.0).topk(TOP, 1)
    return best.log().half(), token.to(torch.int16)
