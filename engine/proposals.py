"""What was proposed beside the target after a sequence: a message to the scheduler and its drafters."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray


class Proposals(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Candidates of each layer of a tree, after a sequence of `position` tokens.

    Those of decoding heads are the same whatever path leads to them: head `i` (from 0) looks `i + 1` tokens
    past that sequence, not knowing the tokens in between, and its row holds the candidates of layer `i + 1`.
    Those of EAGLE are the nodes of a beam, each with its parent in the layer before.

    Attributes:
        position: length of the sequence, prompt and output, whose last token is the root of the next tree.
        token: int32 [layers, candidates], the best first; of as many layers as were asked for.
        logp: float32 [layers, candidates], log-softmax of the scores the tokens were ranked by, given the
            path before them. These are the request's processed logits, with the noise of the output position
            added where it samples (Gumbel coupling, as in `drafters.next_tokens`).
        parent: int32 [layers, candidates], place of the parent among the candidates of the layer before, 0 in
            the first; None where any candidate of that layer is one. The best path comes first.
        seconds: this request's share of the time it took to make them.
    """

    position: int
    token: NDArray[np.int32]
    logp: NDArray[np.float32]
    parent: NDArray[np.int32] | None = None
    seconds: float = 0.0
