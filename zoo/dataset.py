"""Examples as token ids: encoding, balancing the domains, packing into rows of fixed length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from zoo.corpus import DOMAINS, Domain, Example
from zoo.tokenizer import ASSISTANT, BOS, END

#: Bounds in tokens.
MAX_PROMPT, MAX_RESPONSE = 320, 130

#: Share of the response tokens each domain has in one pass over the balanced data.
SHARES: dict[Domain, float] = {"code": 0.4, "chat": 0.4, "summary": 0.2}

#: A domain that has too little is repeated at most this often.
MAX_REPEAT = 2.0

#: Examples of so many batches are sorted by length, so that those of a batch are about equally long.
_BLOCK = 16


@dataclass(frozen=True)
class Tokens:
    """Encoded examples laid end to end: ``ids`` and ``answer`` (1 where the token is part of a response).

    ``starts[i]`` is where example ``i`` begins (with one entry more than there are examples), ``domain[i]``
    the index of its domain in ``DOMAINS``.
    """

    ids: npt.NDArray[np.int16]
    answer: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    domain: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.domain)

    def save(self, path: Path) -> None:
        """Write one uncompressed ``.npz`` file."""
        np.savez(path, ids=self.ids, answer=self.answer, starts=self.starts, domain=self.domain)

    def select(self, keep: npt.NDArray[np.bool_]) -> Tokens:
        """The examples that are marked, in their order."""
        lengths = np.diff(self.starts)
        of_token = np.repeat(keep, lengths)
        starts = np.concatenate([[0], np.cumsum(lengths[keep])]).astype(np.int64)
        return Tokens(self.ids[of_token], self.answer[of_token], starts, self.domain[keep])

    @staticmethod
    def load(path: Path) -> Tokens:
        """Read what ``save`` wrote."""
        with np.load(path) as data:
            return Tokens(data["ids"], data["answer"], data["starts"], data["domain"])


def prompt_text(example: Example) -> str:
    """The prompt with its special tokens, exactly what the chat template renders for its messages."""
    if not example.messages:
        return f"{BOS}{example.prompt}"
    turns = "".join(f"<|{role}|>{content}{END}" for role, content in example.messages)
    return f"{BOS}{turns}{ASSISTANT}"


def encode(tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]) -> Tokens:
    """Encode prompts and responses apart (a serving engine never sees them joined); over-long examples are
    dropped.
    """
    core = tokenizer.backend_tokenizer
    prompts = core.encode_batch([prompt_text(e) for e in examples], add_special_tokens=False)
    responses = core.encode_batch([f"{e.response}{END}" for e in examples], add_special_tokens=False)
    ids: list[int] = []
    answer: list[int] = []
    starts, domain = [0], []
    for example, p, r in zip(examples, prompts, responses, strict=True):
        if len(p.ids) > MAX_PROMPT or len(r.ids) > MAX_RESPONSE:
            continue
        ids += p.ids + r.ids
        answer += [0] * len(p.ids) + [1] * len(r.ids)
        starts.append(len(ids))
        domain.append(DOMAINS.index(example.domain))
    return Tokens(
        np.array(ids, np.int16),
        np.array(answer, np.uint8),
        np.array(starts, np.int64),
        np.array(domain, np.uint8),
    )


def repeats(tokens: Tokens, shares: dict[Domain, float], most: float = MAX_REPEAT) -> list[float]:
    """How often each domain's examples appear in one pass so that response tokens come in the wanted shares.

    The domain that has most relative to its share appears once, the others more often, up to ``most`` times.
    """
    running = np.concatenate([[0], np.cumsum(tokens.answer, dtype=np.int64)])
    per_example = running[tokens.starts[1:]] - running[tokens.starts[:-1]]
    totals = [float(per_example[tokens.domain == d].sum()) for d in range(len(DOMAINS))]
    need = [shares[name] / max(total, 1.0) for name, total in zip(DOMAINS, totals, strict=True)]
    least = min(n for n in need if n > 0)
    return [min(n / least, most) for n in need]


def order(
    tokens: Tokens, shares: dict[Domain, float], rng: np.random.Generator, most: float = MAX_REPEAT
) -> npt.NDArray[np.int64]:
    """Indices of one balanced, shuffled pass over the examples."""
    chosen: list[npt.NDArray[np.int64]] = []
    for d, times in enumerate(repeats(tokens, shares, most)):
        members = np.flatnonzero(tokens.domain == d)
        whole, rest = divmod(times, 1.0)
        chosen += [members] * int(whole)
        chosen.append(rng.permutation(members)[: round(rest * len(members))])
    return rng.permutation(np.concatenate(chosen))


def like_length(
    tokens: Tokens, shares: dict[Domain, float], rows: int, rng: np.random.Generator
) -> Iterator[npt.NDArray[np.int64]]:
    """Endless batches of whole examples, pass after pass: indices [rows] of examples of about one length.

    As many as there are where that is fewer than ``rows``. A domain that has little is repeated up to 20
    times.
    """
    lengths = np.diff(tokens.starts)
    rows = min(rows, len(tokens))
    while True:
        passed = order(tokens, shares, rng, most=20.0)
        for first in range(0, len(passed) - rows + 1, rows * _BLOCK):
            block = passed[first : first + rows * _BLOCK]
            block = block[np.argsort(lengths[block], kind="stable")]
            for at in rng.permutation(len(block) // rows) * rows:
                yield block[at : at + rows]


class Packer:
    """An endless stream of rows, examples laid end to end and cut at the row's length, pass after pass."""

    def __init__(self, tokens: Tokens, shares: dict[Domain, float], seed: int) -> None:
        self._tokens, self._shares = tokens, shares
        self._rng = np.random.default_rng(seed)
        self._queue = order(tokens, shares, self._rng)
        self._at = 0
        self._ids = np.zeros(0, np.int64)
        self._answer = np.zeros(0, np.uint8)

    def rows(self, count: int, length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """``count`` rows of ``length + 1`` tokens (inputs and targets overlap) and their response marks."""
        need = count * (length + 1)
        ids, answer, have = [self._ids], [self._answer], len(self._ids)
        while have < need:
            if self._at == len(self._queue):
                self._queue, self._at = order(self._tokens, self._shares, self._rng), 0
            i = self._queue[self._at]
            self._at += 1
            span = slice(self._tokens.starts[i], self._tokens.starts[i + 1])
            ids.append(self._tokens.ids[span].astype(np.int64))
            answer.append(self._tokens.answer[span])
            have += span.stop - span.start
        flat, marks = np.concatenate(ids), np.concatenate(answer)
        self._ids, self._answer = flat[need:], marks[need:]
        return flat[:need].reshape(count, -1), marks[:need].reshape(count, -1)
