"""What is proposed beside the target after the tokens just decided, for those requests that asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from engine.best_tokens import best_tokens
from engine.devices import Stopwatch
from engine.heads import DecodingHeads
from engine.proposals import Proposals
from engine.sampling import perturbed_scores
from engine.stop_rules import StopRule
from verifier.request_state import RequestState

Int32 = NDArray[np.int32]


class Read(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Rows of one request in the latest forward whose keys and values are kept.

    Attributes:
        request_id: of the request.
        rows: int32 [n], at least one, which of the forward's rows they are.
        tokens: int32 [n], the token after each.
        positions, slots: int32 [n], as of its segment.
        past: int32 [keys], slots of the tokens before; a view, valid in this step.
        is_prompt: whether they are of a prompt that is being prefilled.
    """

    request_id: str
    rows: Int32
    tokens: Int32
    positions: Int32
    slots: Int32
    past: Int32
    is_prompt: bool = False


class Asking(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One request whose next tokens are asked for.

    Attributes:
        state: the request, before `tokens` are committed.
        tokens: newly decided, at least one.
        row: of the forward's kept rows, the one that decided the last of them.
        num_candidates: best tokens wanted of each head, or layer.
        num_heads: how many heads, from the first, they are wanted of, or layers; None for all heads.
        read: place of its rows among what was read.
        least_logp: of the best path of its beam, for another layer to be worth its forward.
        stop_token_logp: of a token of its beam given its parent, for the token to be drafted after.
    """

    state: RequestState
    tokens: Sequence[int]
    row: int
    num_candidates: int
    num_heads: int | None = None
    read: int = -1
    least_logp: float = float("-inf")
    stop_token_logp: float = float("-inf")

    def heads_of(self, num_heads: int) -> int:
        """How many of `num_heads` heads it asks for, at least one."""
        return num_heads if self.num_heads is None else min(max(self.num_heads, 1), num_heads)


class Proposer(Protocol):
    """What proposes beside the target: decoding heads, or EAGLE's layer."""

    def propose(
        self, asking: Sequence[Asking], rule: StopRule | None = None
    ) -> Callable[[], list[Proposals]]:
        """Begin to find out what comes after the tokens decided in the latest forward.

        `rule` is asked after each layer of what is drafted layer by layer.

        Returns:
            what waits for the device, and has the proposals in order; by then the tokens may be committed.
        """
        ...


@runtime_checkable
class ReadingProposer(Proposer, Protocol):
    """A proposer that keeps something of every row the target keeps."""

    def hold(self, num_rows: int) -> torch.Tensor:
        """What `read` needs of all `num_rows` rows of the latest forward, which the next one overwrites."""
        ...

    def read(self, reads: Sequence[Read], *, is_asked: bool, held: torch.Tensor | None = None) -> Stopwatch:
        """Hear of rows of the latest forward, or of the one that `held` was kept of; the time taken.

        Args:
            reads: the rows.
            is_asked: whether proposals are wanted.
            held: as of `hold`, where another forward may have been launched since.
        """
        ...

    def release(self, request_id: str) -> None:
        """This request, which it may not know, is about to give its slots up."""
        ...

    def forget_all(self) -> None:
        """All requests are forgotten, and so are their prefixes."""
        ...


class HeadProposer:
    """Decoding heads as a `Proposer`."""

    def __init__(self, heads: DecodingHeads) -> None:
        self._heads = heads

    def propose(
        self, asking: Sequence[Asking], rule: StopRule | None = None
    ) -> Callable[[], list[Proposals]]:
        """See `Proposer`; all heads are evaluated at once, and no `rule` is asked."""
        found = propose(self._heads, asking)
        return lambda: found


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
