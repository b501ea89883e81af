"""What layers of a model do with the scores of their attention."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Scoring(NamedTuple):
    """What a layer does with its scores besides scaling them.

    Attributes:
        window: tokens that a row sees, itself included; None for all.
        softcap: bound on them, `softcap * tanh(score / softcap)`; None for none.
        sinks: float [heads], for each head one more score that takes its share of the softmax and gives
            nothing; None for none.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


#: What most layers do.
USUAL = Scoring()
