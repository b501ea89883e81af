"""Runners whose forwards can be captured: what the device computes stands apart from what the host does."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention import PaddedAttention, PaddedPlan
from engine.device_rows import DeviceRowsRunner
from engine.runner import KeyTokens

Int32 = NDArray[np.int32]


class Computed(NamedTuple):
    """What a forward computes, of the weights' type.

    Attributes:
        logits: [selected, vocab].
        final: [selected, hidden], what the output projection was given.
        features: [rows, layers * hidden], hidden states that enter the layers asked for (`keep_features`).
    """

    logits: torch.Tensor
    final: torch.Tensor
    features: torch.Tensor


class CapturableRunner(DeviceRowsRunner, Protocol):
    """What `engine.cuda_graphs.GraphedRunner` asks of the runner that it wraps, a `FeatureRunner` besides."""

    def resize(self, num_slots: int) -> None:
        """Make the pool one of `num_slots`; what it held is gone."""
        ...

    @property
    def attention(self) -> PaddedAttention:
        """What holds its keys and values."""
        ...

    @property
    def heads(self) -> int:
        """Query heads of this rank; 0 where they differ from layer to layer."""
        ...

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by, where that is the same in all layers."""
        ...

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks take part in every forward."""
        ...

    @property
    def no_final(self) -> torch.Tensor:
        """[0, hidden], like `Computed.final`."""
        ...

    @property
    def no_features(self) -> torch.Tensor:
        """[0, layers * hidden], like `Computed.features`."""
        ...

    def compute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        plan: PaddedPlan,
        selected: torch.Tensor | None,
        adapters: torch.Tensor | None = None,
    ) -> Computed:
        """The part of a forward that the device does, with nothing that waits for the host.

        Args:
            tokens, positions: int32 or int64 [rows], on the device.
            plan: of the batch.
            selected: rows whose logits are wanted; None for all.
            adapters: int64 [rows], which each row has, 0 for none; None if no row has one.
        """
        ...

    def note(
        self, final: torch.Tensor, features: torch.Tensor, feature_rows: Int32, key_tokens: KeyTokens
    ) -> None:
        """Take in what a forward left that was computed by `compute` alone (see `engine.cuda_graphs`).

        Args:
            final: of the rows kept.
            features: as of `Computed`, of more rows perhaps.
            feature_rows: int32 [rows], which of those each row of the batch is.
            key_tokens: what attention read.
        """
        ...

    @property
    def hidden_scale(self) -> torch.Tensor:
        """See `HiddenStateRunner`."""
        ...

    def last_hidden(self, rows: Int32) -> torch.Tensor:
        """See `HiddenStateRunner`."""
        ...

    def embed(self, tokens: Int32) -> torch.Tensor:
        """See `HiddenStateRunner`."""
        ...

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `HiddenStateRunner`."""
        ...

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """See `FeatureRunner`."""
        ...

    def features(self, rows: Int32) -> torch.Tensor:
        """See `FeatureRunner`."""
        ...

    def embed_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `FeatureRunner`."""
        ...
