"""A verify call whose forward and decisions are launched, and which is not answered yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from engine.devices import Stopwatch
from engine.runner import KeyTokens
from engine.sampling import Decision, DecisionSent
from verifier.messages import Verdict, VerifyCall
from verifier.planning import Planned


class Launched:
    """What a device was told to compute for a call; a CPU has computed it.

    Attributes:
        logits: float32 [decisions, vocab]; those of a later forward once another call is begun.
        prompt_logits: float32 [rows, vocab], of the rows of prompts that were asked for, likewise.
        forward: how long the forward takes.
        decision: of all rows of `logits`; None without any.
        keys: what attention reads.
        failures: verdicts of requests whose grammar cannot be followed.
    """

    __slots__ = ("_sent", "decision", "failures", "forward", "keys", "logits", "prompt_logits")

    def __init__(
        self,
        logits: torch.Tensor,
        prompt_logits: torch.Tensor,
        forward: Stopwatch,
        decision: Decision | None,
        keys: KeyTokens,
        failures: Mapping[str, Verdict] | None = None,
    ) -> None:
        """Have the decisions sent to the host."""
        self.logits, self.prompt_logits, self.forward = logits, prompt_logits, forward
        self.decision, self.keys, self.failures = decision, keys, failures or {}
        self._sent: DecisionSent | None = None if decision is None else decision.sent()

    @property
    def is_decided(self) -> bool:
        """Whether `fetch` would not wait."""
        return self._sent is None or self._sent.has_arrived

    def fetch(self) -> tuple[list[int], list[float]]:
        """Tokens and gaps of all decisions, once they are there."""
        return ([], []) if self._sent is None else self._sent.fetch()


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

    @property
    def num_rows(self) -> int:
        """Of its forward."""
        return sum([len(p.segment.tokens) for p in self.planned])

    @property
    def is_decided(self) -> bool:
        """Whether finishing it would not wait for the device."""
        return self.launched is None or self.launched.is_decided
