"""Token sequences with the target's next-token distribution at every response token: what drafters learn
from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from zoo.corpus import Domain
from zoo.dataset import Tokens, order

#: How many of the target's most probable tokens are kept at each position.
TOP = 32


def unfinished(path: Path) -> Path:
    """Where a file of arrays is until it is complete: beside its place, by a name that begins otherwise.

    What a killed run leaves there is not read with the files that are complete.
    """
    return path.with_name(f"unfinished-{path.name}")


@dataclass(frozen=True)
class Scored:
    """Sequences (as in ``Tokens``) and, for each response token in order, the distribution it was drawn from.

    ``top_ids`` and ``top_logp`` are [response tokens, TOP]: most probable first, log-probabilities in nats
    under the full softmax, so that what they leave to one is the tail's mass.
    """

    tokens: Tokens
    top_ids: npt.NDArray[np.int16]
    top_logp: npt.NDArray[np.float16]

    def save(self, path: Path) -> None:
        """Write one uncompressed ``.npz`` file, complete or not at all."""
        t = self.tokens
        new = unfinished(path)
        np.savez(
            new,
            ids=t.ids,
            answer=t.answer,
            starts=t.starts,
            domain=t.domain,
            top_ids=self.top_ids,
            top_logp=self.top_logp,
        )
        new.replace(path)

    @staticmethod
    def load(paths: Sequence[Path]) -> Scored:
        """Read and join what ``save`` wrote."""
        parts = [dict(np.load(path)) for path in paths]
        lengths = np.concatenate([np.diff(part["starts"]) for part in parts])
        tokens = Tokens(
            np.concatenate([part["ids"] for part in parts]),
            np.concatenate([part["answer"] for part in parts]),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.concatenate([part["domain"] for part in parts]),
        )
        top_ids = np.concatenate([part["top_ids"] for part in parts])
        return Scored(tokens, top_ids, np.concatenate([part["top_logp"] for part in parts]))


class ScoredBuilder:
    """Collects sequences one by one."""

    def __init__(self) -> None:
        self._ids: list[npt.NDArray[np.int16]] = []
        self._answer: list[npt.NDArray[np.uint8]] = []
        self._domain: list[int] = []
        self._top_ids: list[npt.NDArray[np.int16]] = []
        self._top_logp: list[npt.NDArray[np.float16]] = []
        self.response_tokens = 0

    def add(
        self,
        domain: int,
        prompt: Sequence[int],
        response: Sequence[int],
        top_ids: npt.NDArray[np.int16],
        top_logp: npt.NDArray[np.float16],
    ) -> None:
        """One sequence; the arrays have a row for each response token."""
        self._ids.append(np.array([*prompt, *response], np.int16))
        self._answer.append(np.array([0] * len(prompt) + [1] * len(response), np.uint8))
        self._domain.append(domain)
        self._top_ids.append(top_ids)
        self._top_logp.append(top_logp)
        self.response_tokens += len(response)

    def build(self) -> Scored:
        """Everything collected so far."""
        starts = np.concatenate([[0], np.cumsum([len(ids) for ids in self._ids])]).astype(np.int64)
        tokens = Tokens(
            np.concatenate(self._ids), np.concatenate(self._answer), starts, np.array(self._domain, np.uint8)
        )
        return Scored(tokens, np.concatenate(self._top_ids), np.concatenate(self._top_logp))


@dataclass(frozen=True)
class Batch:
    """Rows of packed tokens; ``where`` are flat positions whose *next* token is a scored response token."""

    ids: npt.NDArray[np.int64]
    where: npt.NDArray[np.int64]
    top_ids: npt.NDArray[np.int64]
    top_logp: npt.NDArray[np.float32]


def batches(
    scored: Scored, shares: dict[Domain, float], rows: int, length: int, rng: np.random.Generator
) -> Iterator[Batch]:
    """Endless packed batches of ``rows`` x ``length`` tokens, domains in the given shares of response
    tokens.
    """
    tokens = scored.tokens
    before = np.concatenate([[0], np.cumsum(tokens.answer, dtype=np.int64)])
    need = rows * length
    queue = np.zeros(0, np.int64)
    while True:
        spans: list[npt.NDArray[np.int64]] = []
        have = 0
        while have < need:
            if not len(queue):
                queue = order(tokens, shares, rng, most=20.0)
            i, queue = queue[0], queue[1:]
            spans.append(np.arange(tokens.starts[i], tokens.starts[i + 1]))
            have += len(spans[-1])
        at = np.concatenate(spans)[:need]
        # A position predicts its successor; the last of a row has none, and a sequence's first token is no
        # response.
        inner = np.arange(need) % length != length - 1
        marked = np.concatenate([tokens.answer[at[1:]] > 0, [False]])
        where = np.flatnonzero(inner & marked)
        index = before[at[where + 1]]
        yield Batch(
            tokens.ids[at].astype(np.int64).reshape(rows, length),
            where,
            scored.top_ids[index].astype(np.int64),
            scored.top_logp[index].astype(np.float32),
        )
