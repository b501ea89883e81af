"""The seam between those who hold requests (drafters, verifier) and those who run models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


class Segment(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One request's rows in a forward pass.

    Attributes:
        tokens: int32 [rows], input token ids.
        positions: int32 [rows], position of each row in its sequence (a tree node's depth added to the
            context length, so siblings share a position).
        slots: int32 [rows], KV slots the rows write.
        past: int32 [keys], KV slots of earlier tokens, in order.
        visible: bool [rows, recent] or None. The keys of a row are `past` followed by `slots`; `visible`
            says which of the LAST `recent` keys each row attends to (recent >= rows), all keys before
            those are visible to every row. None is the causal case: every row sees all of `past`, itself
            and the rows before it.
        adapter: number of the LoRA adapter that its rows are computed with, from 1; 0 for none.
        unseen: int32 [rows] or None. How many of the first keys each row does not attend to; None is 0.
    """

    tokens: Int32
    positions: Int32
    slots: Int32
    past: Int32
    visible: NDArray[np.bool_] | None = None
    adapter: int = 0
    unseen: Int32 | None = None


class KeyTokens(NamedTuple):
    """Keys that attention reads in each layer of a forward: those of the segments, and padding besides."""

    real: int
    padding: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What callers need to know of a model.

    Attributes:
        vocab_size: token ids run below this.
        max_tokens: longest sequence.
        num_layers: layers with keys and values.
        kv_bytes_per_token: of the KV pool, over all layers.
        expert_share: of a layer's experts, how many each token is sent to; 0 for a model without any.
        windows: tokens that rows see in layers with sliding windows narrower than the longest sequence,
            themselves included; ascending.
    """

    vocab_size: int
    max_tokens: int
    num_layers: int
    kv_bytes_per_token: int
    expert_share: float = 0.0
    windows: tuple[int, ...] = ()


class ModelRunner(Protocol):
    """Runs one causal language model over a ragged batch; owns the KV storage, not its bookkeeping."""

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        ...

    @property
    def num_slots(self) -> int:
        """KV slots in the pool; slot numbers run from 0 to num_slots - 1."""
        ...

    @property
    def key_tokens(self) -> KeyTokens:
        """What attention read in each layer of the last forward."""
        ...

    def forward(self, segments: Sequence[Segment], keep: Int32) -> torch.Tensor:
        """Logits, float32 [len(keep), vocab], of the rows `keep` (indices into the concatenated rows).

        Writes the keys and values of all rows to their slots. Rows of different segments never see
        each other. The logits are the caller's until the next forward, which may overwrite them.
        """
        ...
