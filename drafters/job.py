"""State of a model drafter: what it keeps of a request, and one item while it is served."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from drafters.beam import Beam
from drafters.heard import Heard
from engine.sampling import Row, TokenHistory
from engine.sampling_params import SamplingParams

Int32 = NDArray[np.int32]

SCORED_WITH_PENALTIES = 64


def _no_slots() -> Int32:
    return np.zeros(0, dtype=np.int32)


@dataclass(slots=True)
class Held(Heard):
    """Everything kept of a request between calls, its KV apart.

    Attributes:
        stops: tokens that end generation.
        scored: committed tokens before this position are not scored (again).
        last: the tree grown last, whose slots stay reserved until the next call; None if its root is
            not the last token heard.
    """

    stops: frozenset[int] = frozenset()
    scored: int = 0
    last: Beam | None = None
    _history: TokenHistory | None = None
    _history_length: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether tokens are ranked by the model's own logits: greedy and nothing that shifts them."""
        return _is_plain(self.spec.sampling)

    def roll_back(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        del self.tokens[length:]
        self.scored = min(self.scored, length)
        self._history = None

    def begin(self) -> None:
        """Get ready to describe rows of `tokens` from the first that is to be scored."""
        params, length = self.spec.sampling, len(self.tokens)
        if not params.has_penalties:
            return
        # Describing a row costs its distance from the history: a sample of a long catch-up will do.
        self.scored = max(self.scored, length - SCORED_WITH_PENALTIES)
        first = min(max(self.scored, self.spec.prompt_len), length)
        if self._history is None or self._history_length > first:
            prompt_len = self.spec.prompt_len
            self._history = TokenHistory(self.tokens[:prompt_len], self.tokens[prompt_len:first])
            self._history_length = first

    def caught_up(self) -> None:
        """All of `tokens` has KV and was scored; rows described from here on follow the last of them."""
        self.scored = len(self.tokens)
        if self._history is not None:
            self._history.extend(self.tokens[self._history_length :])
            self._history_length = len(self.tokens)

    def row(self, position: int) -> Row:
        """The decision after the committed token at `position`."""
        path = self.tokens[self._history_length : position + 1] if self._history is not None else ()
        return Row(self.spec.sampling, position + 1 - self.spec.prompt_len, self._history, path)

    def tree_row(self, beam: Beam, node: int) -> Row:
        """The decision after a node of the frontier of `beam`, whose root is the last of `tokens`."""
        path = beam.path_tokens(node) if self._history is not None else ()
        position = len(self.tokens) + beam.depth - self.spec.prompt_len
        return Row(self.spec.sampling, position, self._history, path)


def _is_plain(params: SamplingParams) -> bool:
    return (
        params.is_greedy
        and not params.has_penalties
        and not params.logit_bias
        and not (params.min_tokens and params.stop_token_ids)
    )


@dataclass(slots=True, eq=False)
class Job:
    """One item of the call while it is served.

    Attributes:
        request_id: the request.
        held: its state.
        beam: its tree; the root alone until catching up is done.
        slots: int32, reserved for the rows still to catch up on, later for those of the tree.
        done: committed tokens that have KV.
        opened: whether the KV cache opened the request in this call.
        num_scored, num_agreed: as in `Draft`.
    """

    request_id: str
    held: Held
    beam: Beam
    slots: Int32 = field(default_factory=_no_slots)
    done: int = 0
    opened: bool = False
    num_scored: int = 0
    num_agreed: int = 0
