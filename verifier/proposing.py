"""What the decoding heads propose after the tokens just decided, for those requests that asked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.best_tokens import best_tokens
from engine.heads import DecodingHeads
from engine.proposals import Proposals
from engine.sampling import perturbed_scores
from verifier.request_state import RequestState


@dataclass(frozen=True, slots=True)
class Asking:
    """One request whose next tokens the heads are asked for.

    Attributes:
        state: the request, before `tokens` are committed.
        tokens: newly decided, at least one.
        row: of the forward's kept rows, the one that decided the last of them.
        num_candidates: best tokens of each head wanted.
        num_heads: how many heads, from the first, they are wanted of; None for all.
    """

    state: RequestState
    tokens: Sequence[int]
    row: int
    num_candidates: int
    num_heads: int | None = None

    def heads_of(self, num_heads: int) -> int:
        """How many of `num_heads` heads it asks for, at least one."""
        return num_heads if self.num_heads is None else min(max(self.num_heads, 1), num_heads)


def propose(heads: DecodingHeads, asking: Sequence[Asking]) -> list[Proposals]:
    """Evaluate the heads on the hidden states of the latest forward.

    A head's tokens are ranked as the target would rank them there: processed logits, and for a sampling
    request the noise of the very output position (design, idea 2). That needs all logits, which is why it is
    done here and not by the drafter.
    """
    if not asking:
        return []
    begun = time.perf_counter()
    n, asked = len(asking), [one.heads_of(heads.num_heads) for one in asking]
    num_heads = max(asked)
    logits = heads.logits(
        np.array([one.row for one in asking], dtype=np.int32),
        np.array([one.tokens[-1] for one in asking], dtype=np.int32),
        num_heads,
    )
    rows = [row for one in asking for row in one.state.rows_ahead(one.tokens, num_heads)]
    scores = perturbed_scores(logits.view(n * num_heads, -1), rows)
    # Noise is no log-probability: what counts is a candidate's margin over the others (drafters.next_tokens).
    if any(not one.state.params.is_greedy for one in asking):
        scores = scores.log_softmax(dim=-1)
    values, ids = best_tokens(scores, max(one.num_candidates for one in asking))
    logp = values.reshape(n, num_heads, -1)
    token = ids.astype(np.int32).reshape(n, num_heads, -1)
    share = (time.perf_counter() - begun) / n
    return [
        Proposals(
            position=len(one.state.tokens) + len(one.tokens),
            token=token[i, : asked[i], : one.num_candidates].copy(),
            logp=logp[i, : asked[i], : one.num_candidates].copy(),
            seconds=share,
        )
        for i, one in enumerate(asking)
    ]
