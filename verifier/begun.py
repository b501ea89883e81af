"""A verify call whose forward and decisions are launched, and which is not answered yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.devices import index_on
from verifier.launching import Launched
from verifier.messages import Verdict, VerifyCall
from verifier.planning import Planned


@dataclass(slots=True, eq=False)
class Begun:
    """A verify call between its two halves.

    Attributes:
        call: what was asked.
        started: when its time began to count, on the clock of `time.perf_counter`; for one that followed
            another, when that was finished.
        planned: items with rows in the forward, in their order.
        finished: verdicts of requests that get nothing from it.
        deferred, unknown: as of `VerifyResult`.
        launched: its forward and decisions; None if it has no rows.
        is_open: whether another may be begun before it is finished.
        follower: the one that was.
        releases: what that one asked to forget, and has rows in this one.
        held: what a proposer is to read of the forward, if it keeps something of every row, and another
            forward may be launched before that.
    """

    call: VerifyCall
    started: float
    planned: list[Planned] = field(default_factory=list)
    finished: list[Verdict] = field(default_factory=list)
    deferred: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    launched: Launched | None = None
    is_open: bool = False
    follower: Begun | None = None
    releases: list[str] = field(default_factory=list)
    held: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Of its forward."""
        return sum([len(p.segment.tokens) for p in self.planned])

    @property
    def is_decided(self) -> bool:
        """Whether finishing it would not wait for the device."""
        return self.launched is None or self.launched.is_decided

    def tokens_after(self, rows: Sequence[Planned]) -> torch.Tensor:
        """int64 [rows], where the decisions are: the token of each of these, which `decides_one`."""
        assert self.launched is not None
        assert self.launched.decision is not None
        tokens = self.launched.decision.tokens
        place: dict[int, int] = {}
        num_decisions = 0
        for p in self.planned:
            place[id(p)] = num_decisions
            num_decisions += 0 if p.tree is None else len(p.tree)
        which = [place[id(p)] for p in rows]
        if which == list(range(len(tokens))):
            return tokens
        return tokens.index_select(0, index_on(np.array(which), tokens.device))
