"""What decoding heads learn from: the target's last hidden states along its own answers, computed once.

One row per response token: the hidden state that decided it, the token itself, and where its answer ends, so
that the tokens after it are the labels of the heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaForCausalLM

from zoo import clock, models
from zoo.scored import Scored, unfinished

#: Sequences of a block are sorted by length, so that those of a batch are about equally long.
_BATCH, _BLOCK = 32, 16


@dataclass(frozen=True)
class HiddenRows:
    """Rows of response tokens, answer after answer.

    ``hidden`` is float16 [rows, width], the input of the output projection that decided the row's token
    (after the final norm); ``token`` int16 [rows]; ``left`` int16 [rows], response tokens after it in its
    answer; ``domain`` uint8 [rows]; ``top_ids`` and ``top_logp`` [rows, TOP] as in ``Scored``, of that
    decision.
    """

    hidden: npt.NDArray[np.float16]
    token: npt.NDArray[np.int16]
    left: npt.NDArray[np.int16]
    domain: npt.NDArray[np.uint8]
    top_ids: npt.NDArray[np.int16]
    top_logp: npt.NDArray[np.float16]

    def __len__(self) -> int:
        return len(self.token)

    def save(self, path: Path) -> None:
        """Write one uncompressed ``.npz`` file, complete or not at all."""
        new = unfinished(path)
        np.savez(new, **self.__dict__)
        new.replace(path)

    @staticmethod
    def load(paths: Sequence[Path]) -> HiddenRows:
        """Read and join what ``save`` wrote."""
        parts = [dict(np.load(path)) for path in paths]
        return HiddenRows(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def collect(model_dir: Path, scored: Scored, minutes: float) -> HiddenRows:
    """Hidden states along the first sequences of ``scored`` that a budget of minutes suffices for, at least a
    block of them.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # bfloat16 as when the answers were written: its rounding is far below what a head can resolve.
    model = models.load(model_dir).to(torch.bfloat16).to(device)
    tokens = scored.tokens
    lengths = np.diff(tokens.starts)
    answers = np.add.reduceat(tokens.answer.astype(np.int64), tokens.starts[:-1])
    hidden: list[npt.NDArray[np.float16]] = []
    begun = clock.seconds()
    done = 0
    while done < len(tokens) and (not done or clock.seconds() - begun < minutes * 60.0):
        block = np.arange(done, min(done + _BATCH * _BLOCK, len(tokens)))
        found: dict[int, npt.NDArray[np.float16]] = {}
        by_length = block[np.argsort(lengths[block])]
        for at in range(0, len(by_length), _BATCH):
            found |= _batch(model, scored, by_length[at : at + _BATCH].tolist(), answers)
        hidden += [found[i] for i in block.tolist()]
        done += len(block)
    end = int(tokens.starts[done])
    marks = tokens.answer[:end] > 0
    rows = int(answers[:done].sum())
    left = np.concatenate([np.arange(n - 1, -1, -1) for n in answers[:done].tolist()])
    return HiddenRows(
        np.concatenate(hidden),
        tokens.ids[:end][marks],
        left.astype(np.int16),
        np.repeat(tokens.domain[:done], answers[:done]),
        scored.top_ids[:rows],
        scored.top_logp[:rows],
    )


@torch.inference_mode()
def _batch(
    model: LlamaForCausalLM, scored: Scored, rows: list[int], answers: npt.NDArray[np.int64]
) -> dict[int, npt.NDArray[np.float16]]:
    tokens = scored.tokens
    starts = tokens.starts
    ids = np.zeros((len(rows), max(int(starts[i + 1] - starts[i]) for i in rows)), np.int64)
    for row, i in enumerate(rows):
        text = tokens.ids[starts[i] : starts[i + 1]]
        ids[row, : len(text)] = text
    # Padding lies to the right, where causal attention never looks from.
    given = torch.from_numpy(ids).to(model.device)
    hidden = model.model(given, use_cache=False).last_hidden_state.to(torch.float16).cpu().numpy()
    found = {}
    for row, i in enumerate(rows):
        first = int(starts[i + 1] - starts[i] - answers[i]) - 1  # the prompt's last token decides the first
        found[i] = hidden[row, first : first + int(answers[i])].copy()
    return found


@dataclass(frozen=True)
class HeadBatch:
    """``hidden`` float16 [rows, width] and ``token`` int64 [rows]; for each head, what it should predict.

    ``top_ids`` int64 and ``top_logp`` float32 are [heads, rows, TOP]; ``valid`` bool [heads, rows] is false
    where the answer has ended before.
    """

    hidden: npt.NDArray[np.float16]
    token: npt.NDArray[np.int64]
    top_ids: npt.NDArray[np.int64]
    top_logp: npt.NDArray[np.float32]
    valid: npt.NDArray[np.bool_]


def batches(data: HiddenRows, heads: int, size: int, seed: int) -> Iterator[HeadBatch]:
    """Endless random batches of rows that have something to predict, pass after pass; all rows if too few.

    Raises:
        ValueError: if no row has anything to predict.
    """
    rng = np.random.default_rng(seed)
    useful = np.flatnonzero(data.left > 0)
    if not len(useful):
        raise ValueError("no answer has two tokens: there is nothing to train heads on")
    size = min(size, len(useful))
    ahead = np.arange(1, heads + 1)[:, None]
    while True:
        order = rng.permutation(useful)
        for at in range(0, len(order) - size + 1, size):
            rows = np.sort(order[at : at + size])
            valid = data.left[rows] >= ahead
            labels = np.minimum(rows + ahead, len(data) - 1)
            yield HeadBatch(
                data.hidden[rows],
                data.token[rows].astype(np.int64),
                data.top_ids[labels].astype(np.int64),
                data.top_logp[labels].astype(np.float32),
                valid,
            )
