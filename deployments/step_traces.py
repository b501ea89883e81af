"""What a stream tells of each step if `speculation.trace` asks for it (docs/api.md, "Traces")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.requests import GRAMMAR
from cluster.stream_messages import StepTrace, TokenEvent
from deployments.text_codec import TextCodec
from verifier.messages import TokenLogprobs

#: Shown for minus infinity, which JSON cannot hold.
_LEAST_LOGP = -9999.0


@dataclass(frozen=True)
class TracedStep:
    """A step of one choice.

    Attributes:
        position: output position of its first token.
        drafter: who drafted the accepted tokens that no grammar added.
        num_accepted: how many of its tokens, from the first, were drafted.
        trace: its token tree.
        pieces: the text each of its tokens added; fewer than its tokens if the choice ended among them.
    """

    position: int
    drafter: str
    num_accepted: int
    trace: StepTrace
    pieces: Sequence[str]

    @classmethod
    def of(cls, event: TokenEvent, pieces: Sequence[str]) -> TracedStep | None:
        """The step an event tells of; None if it has no trace."""
        if event.trace is None:
            return None
        return cls(event.position, event.drafter, event.num_accepted, event.trace, pieces)

    def body(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], codec: TextCodec
    ) -> dict[str, Any]:
        """The field `flotilla` of a chunk with these tokens and, if asked for, their log-probabilities."""
        trace = self.trace
        shown = [
            {
                "id": token,
                "text": self.pieces[index] if index < len(self.pieces) else "",
                "drafter": self._drafter_of(index),
                "depth": index + 1,
                "logprob": max(logprobs[index].logprob, _LEAST_LOGP) if index < len(logprobs) else None,
            }
            for index, token in enumerate(tokens)
        ]
        return {
            "step": trace.step,
            "position": self.position,
            "elapsed_ms": trace.elapsed_ms,
            "drafter": trace.drafter or None,
            "tokens": shown,
            "tree": {
                "tokens": trace.tokens,
                "texts": [codec.token_text(token) for token in trace.tokens],
                "parents": trace.parents,
                "logps": [max(logp, _LEAST_LOGP) for logp in trace.logps],
                "verified": trace.verified,
                "accepted": trace.accepted,
            },
        }

    def _drafter_of(self, index: int) -> str | None:
        """Who proposed the token; None for the target's own."""
        if index >= self.num_accepted:
            return None
        return GRAMMAR if index >= self.num_accepted - self.trace.num_forced else self.drafter
