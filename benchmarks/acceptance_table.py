"""A log of what drafters say along answers, as flat columns; without torch, for who fits models to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class AcceptanceTable:
    """One row for each drafter, answer and position; those of a drafter and answer are neighbours, in order.

    Attributes:
        drafters: names, by index.
        domains: classes of the answers, by index.
        width: choices per row.
        drafter, answer: int [rows], indices.
        position: int [rows], of the token in the answer that is guessed; from 1, for the first comes with the
            prompt.
        logp: float32 [rows, width], what the drafter gives its choices, descending; -inf where it has fewer.
        rank: int8 [rows], which of them the answer's token is; `width` if none.
    """

    drafters: list[str]
    domains: list[str]
    width: int
    drafter: NDArray[np.int16]
    answer: NDArray[np.int32]
    position: NDArray[np.int32]
    logp: NDArray[np.float32]
    rank: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.rank)

    def save(self, path: Path) -> None:
        """Write it, compressed (`numpy.savez_compressed`), under the very name given."""
        # Opened here: to a name without `.npz` numpy adds it, and what is looked for next time is not there.
        with path.open("wb") as file:
            np.savez_compressed(
                file,
                drafters=np.array(self.drafters),
                domains=np.array(self.domains),
                width=np.array(self.width),
                drafter=self.drafter,
                answer=self.answer,
                position=self.position,
                logp=self.logp,
                rank=self.rank,
            )

    @classmethod
    def load(cls, path: Path) -> AcceptanceTable:
        """What `save` wrote.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is something else.
        """
        other = f"{path} is no log of drafters' choices (`flotilla bench acceptance` records one)"
        try:
            loaded = np.load(path, allow_pickle=False)
        except (EOFError, ValueError, BadZipFile):  # empty; no file of numpy's; cut off
            raise ValueError(other) from None
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise ValueError(other)
        with loaded as held:
            if "rank" not in held:
                raise ValueError(other)
            return cls(
                drafters=held["drafters"].tolist(),
                domains=held["domains"].tolist(),
                width=int(held["width"]),
                **{name: held[name] for name in ("drafter", "answer", "position", "logp", "rank")},
            )

    def where(self, rows: NDArray[np.bool_]) -> AcceptanceTable:
        """The rows of a mask, bool [rows]; indices keep their meaning."""
        columns = {
            name: getattr(self, name)[rows] for name in ("drafter", "answer", "position", "logp", "rank")
        }
        return AcceptanceTable(self.drafters, self.domains, self.width, **columns)

    def of_answers(self, remainder: int, parts: int) -> AcceptanceTable:
        """Every `parts`-th answer of each class, from the `remainder`-th on: a fold to fit or hold out."""
        seen: dict[str, int] = {}
        keep = np.zeros(len(self.domains), dtype=np.bool_)
        for index, domain in enumerate(self.domains):
            keep[index] = seen.get(domain, 0) % parts == remainder
            seen[domain] = seen.get(domain, 0) + 1
        return self.where(keep[self.answer])

    def answers(self, drafter: int, domain: str) -> list[NDArray[np.int64]]:
        """Row numbers of each answer of a class, for one drafter."""
        chosen = np.flatnonzero((self.drafter == drafter) & (np.array(self.domains)[self.answer] == domain))
        if len(chosen) == 0:
            return []
        breaks = np.flatnonzero(np.diff(self.answer[chosen])) + 1
        return [part.astype(np.int64) for part in np.split(chosen, breaks)]
