"""What a scheduler has counted since its start."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from cluster.outstanding_verify import OutstandingVerify
from verifier.messages import VerifyResult


@dataclass(slots=True)
class Totals:
    """Counters since the start; rates are derived by whoever reads them."""

    steps: int = 0
    # Of these, sent before the one before was answered, by whether drafts were planned in them.
    steps_ahead: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    drafted_tokens: int = 0
    verified_tokens: int = 0
    accepted_tokens: int = 0
    committed_tokens: int = 0
    preemptions: int = 0
    draft_timeouts: int = 0
    forward_s: float = 0.0
    draft_forward_s: float = 0.0
    # Keys that attention of the target read in each layer, and keys of padding besides.
    key_tokens: int = 0
    padded_tokens: int = 0
    # Decode iterations, tokens they committed, seconds of whole ones, and of those, waiting for the slowest
    # drafter, the target's forward, and the target's work beside it.
    iterations: int = 0
    step_tokens: int = 0
    step_s: float = 0.0
    step_draft_s: float = 0.0
    step_verify_s: float = 0.0
    step_target_s: float = 0.0
    cached_prompt_tokens: int = 0
    accepted_by_drafter: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    verified_by_drafter: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def count_step(self, result: VerifyResult, sent: OutstandingVerify) -> None:
        """One verify step, and as what it was sent."""
        self.steps += 1
        if sent.was_ahead:
            self.steps_ahead[bool(sent.plans)] += 1
        self.forward_s += result.forward_seconds
        self.key_tokens += result.key_tokens
        self.padded_tokens += result.padded_tokens
