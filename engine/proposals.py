"""What decoding heads proposed after one sequence: a message between verifier, scheduler and drafters."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray


class Proposals(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The best next tokens by each decoding head, after a sequence of `position` tokens.

    Head `i` (from 0) looks `i + 1` tokens past that sequence, not knowing the tokens in between: so its row
    holds the candidates of layer `i + 1` of a tree, whatever path leads there.

    Attributes:
        position: length of the sequence, prompt and output, whose last token is the root of the next tree.
        token: int32 [heads, candidates], the best first; of as many heads as were asked for.
        logp: float32 [heads, candidates], descending: log-softmax of the scores the tokens were ranked by.
            These are the request's processed logits, with the noise of the output position added where it
            samples (Gumbel coupling, as in `drafters.next_tokens`).
        seconds: this request's share of the time it took to evaluate the heads.
    """

    position: int
    token: NDArray[np.int32]
    logp: NDArray[np.float32]
    seconds: float = 0.0
