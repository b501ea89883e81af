"""EAGLE-3's draft layer (Li et al. 2025, arXiv 2503.01840) over slots of a KV pool.

It reads two things at a position: what the target made of the tokens up to it, three of its hidden states
(*features*), and the token that came next. So it begins where the target stopped, and takes one decoder layer
to say what comes after that token. Tokens drafted further on have no features; there it reads its own output
at the position before in their place, which it was trained to do.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine.attention import PaddedAttention, PaddedPlan
from engine.eagle_weights import EagleWeights
from engine.gated import gate, gate_by_triton
from engine.runner import ModelRunner
from engine.triton_attention import TritonAttention

Int32 = NDArray[np.int32]


@runtime_checkable
class FeatureRunner(ModelRunner, Protocol):
    """A runner that keeps hidden states of layers within it, and lends its embeddings and projection."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...

    @property
    def hidden_scale(self) -> torch.Tensor:
        """See `HiddenStateRunner`."""
        ...

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `HiddenStateRunner`."""
        ...

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers whose inputs are kept."""
        ...

    def features(self, rows: Int32) -> torch.Tensor:
        """[rows, layers * hidden], what entered those layers in the latest forward, of any of its rows."""
        ...

    def embed_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden], input embeddings of tokens on the device."""
        ...


class EagleLayer:
    """The layer on its target.

    Attributes:
        weights: of it.
        attention: its keys and values.
    """

    def __init__(self, weights: EagleWeights, runner: FeatureRunner, attention: PaddedAttention) -> None:
        """`attention` has as many slots as `runner`, and those of drafts after them."""
        self.weights = weights
        self.attention = attention
        attention.allocate(0, weights.kv_heads, weights.head_dim, weights.head_dim)
        self._runner = runner
        self._gated = gate_by_triton if isinstance(attention, TritonAttention) else gate
        dtype = weights.output_scale.dtype
        # The target's own projection has the scales of the target's norm in it; what one of zero took from it
        # is lost, and infinity would take all the rest.
        inverse = 1.0 / runner.hidden_scale.float()
        unscale = inverse.masked_fill(inverse.isinf(), 0.0) if weights.head is None else None
        self._unscale = None if unscale is None else unscale.to(dtype)
        scale = weights.output_scale.float()
        self._output_scale = (scale if unscale is None else scale * unscale).to(dtype)

    def combined(self, features: torch.Tensor) -> torch.Tensor:
        """[rows, hidden], what the layer reads of the target's `features` [rows, 3 * target hidden]."""
        weights = self.weights
        if weights.feature_norm is not None:
            features = F.rms_norm(features, (features.shape[1],), weights.feature_norm, weights.eps)
        return weights.combine(features)

    def forward(
        self, hidden: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, plan: PaddedPlan
    ) -> torch.Tensor:
        """[rows, hidden], what is read at the positions after, before the final norm.

        Args:
            hidden: [rows, hidden], `combined` features or this method's own output; may be overwritten.
            tokens: int64 [rows], the token after each position.
            positions: int64 [rows].
            plan: of the rows, by `attention`.
        """
        weights, attention, shape = self.weights, self.attention, (self.weights.hidden_size,)
        embedded = self._runner.embed_ids(tokens) if weights.embedding is None else weights.embedding[tokens]
        both = F.rms_norm(torch.stack((embedded, hidden), 1), shape, None, weights.eps)
        residual = hidden if weights.residual_scale is None else both[:, 1] * weights.residual_scale
        qkv = weights.qkv(both.flatten(1))
        rotation, heads = weights.rotation.index_select(0, positions), weights.heads
        mixed = attention.attend_rotated(plan, 0, qkv, rotation, heads, weights.head_dim**-0.5)
        x = weights.out.add_to(residual, mixed)
        gates = weights.gate_up(F.rms_norm(x, shape, None, weights.eps))
        x = weights.down.add_to(x, self._gated(gates))
        if weights.norm_output:
            return F.rms_norm(x, shape, weights.output_scale, weights.eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, drafted tokens], of rows of what `forward` returned."""
        weights = self.weights
        if weights.norm_output:
            normalised = hidden if self._unscale is None else hidden * self._unscale
        else:
            normalised = F.rms_norm(hidden, (weights.hidden_size,), self._output_scale, weights.eps)
        head = self._runner.project if weights.head is None else weights.head
        return head(normalised).float()
