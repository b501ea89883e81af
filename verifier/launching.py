"""What a device is told to compute for a verify call: one forward, and the decisions after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.decision import Decision, DecisionSent
from engine.device_rows import DeviceRows, DeviceRowsRunner
from engine.devices import Stopwatch
from engine.grammar import GrammarError
from engine.runner import KeyTokens, ModelRunner
from engine.sampling import Row, decide
from verifier.messages import Verdict
from verifier.planning import Planned
from verifier.verdicts import failure_of

Int32 = NDArray[np.int32]


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
        """Whether `fetch` would not wait, nor `forward`, which alone tells the end of a part of a prompt."""
        return self.forward.has_stopped if self._sent is None else self._sent.has_arrived

    def fetch(self) -> tuple[list[int], list[float]]:
        """Tokens and gaps of all decisions, once they are there."""
        return ([], []) if self._sent is None else self._sent.fetch()


def launch(
    runner: ModelRunner, device: torch.device, planned: Sequence[Planned], following: torch.Tensor | None
) -> Launched:
    """Launch a forward of these rows, and their decisions.

    Args:
        runner: of the model.
        device: where its logits are.
        planned: at least one.
        following: int64 [items], tokens of the first of them, of a row each, that only the device knows.
    """
    segments = [p.segment for p in planned]
    kept, num_decided = _rows_kept(planned)
    watch = Stopwatch(device)
    if following is None:
        logits = runner.forward(segments, kept)
    else:
        assert isinstance(runner, DeviceRowsRunner)
        logits = runner.forward_rows(segments, DeviceRows(following), kept)
    watch.stop()
    num_following = 0 if following is None else len(following)
    rows: list[Row] = [p.state.row_after_next() for p in planned[:num_following]]
    failures: dict[str, Verdict] = {}
    for p in planned[num_following:]:
        if p.tree is not None:
            failure = _mask_prefilled(p)
            if failure is not None:
                failures[p.state.request_id] = failure
            rows.extend(p.state.rows(p.tree, p.masks))
    decision = decide(logits[:num_decided], rows) if rows else None
    return Launched(logits[:num_decided], logits[num_decided:], watch, decision, runner.key_tokens, failures)


def _rows_kept(planned: Sequence[Planned]) -> tuple[Int32, int]:
    """Rows whose logits are wanted: those that decide, how many these are, and then those of prompts."""
    if not any(p.is_prefill for p in planned):  # all of them
        num_rows = sum([len(p.segment.tokens) for p in planned])
        return np.arange(num_rows, dtype=np.int32), num_rows
    decided: list[Int32] = []
    prompts: list[Int32] = []
    row = 0
    for p in planned:
        end = row + len(p.segment.tokens)
        if p.tree is not None:
            decided.append(np.arange(row + p.num_context, end, dtype=np.int32))
        if p.is_prefill and p.state.wants_prompt_logprobs:
            prompts.append(np.arange(row, row + p.num_context, dtype=np.int32))
        row = end
    parts = decided + prompts
    kept = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
    return kept, sum(map(len, decided))


def _mask_prefilled(p: Planned) -> Verdict | None:
    """Mask the decision at the end of a prefill: after the forward, so that a grammar compiles meanwhile.

    Returns:
        the verdict of a request whose grammar cannot be followed, else None.
    """
    if p.tree is None or p.masks is not None or p.state.params.constraint is None:
        return None
    try:
        masked = p.state.masked(p.tree)
    except GrammarError as error:
        return failure_of(p.state.request_id, error)
    p.masks = masked.masks if masked is not None else None
    return None
