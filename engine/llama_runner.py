"""A lean runner for the Llama family: the same results as `HFRunner` with a fraction of its overhead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine.adapted_linear import adapters_on
from engine.attention import PaddedAttention, PaddedPlan
from engine.attention_kinds import AttentionKind, make_attention
from engine.capturable import Computed
from engine.device_rows import DeviceRows, tokens_of
from engine.devices import to_device
from engine.experts import AnyLinear, FeedForward
from engine.gated import gate, gate_by_triton
from engine.llama_weights import LlamaWeights
from engine.mixture import Mixture
from engine.norms import PendingNorm, normalised_by_triton
from engine.runner import KeyTokens, ModelShape, Segment
from engine.triton_attention import TritonAttention
from engine.triton_support import runs_triton

Int32 = NDArray[np.int32]

#: Rows up to which a layer's norms are left to the kernels that read what was multiplied: each of their
#: programs reads a row for its divisor, which takes longer than norms of their own where rows are many.
MOST_LATE_ROWS = 8


class LlamaRunner:
    """`ModelRunner` and `DeviceRowsRunner` for Llama-shaped models: fused weights, few operations a layer.

    With tensor parallelism every rank holds a share of the heads and of the feed-forward units, and all
    ranks must make the same calls; embeddings and output projection are replicated, so that logits are
    bit-identical on all ranks. Not for use by several threads at once.
    """

    def __init__(
        self,
        weights: LlamaWeights,
        num_slots: int,
        attention: AttentionKind | PaddedAttention | None = None,
    ) -> None:
        """Run `weights` with a pool of `num_slots` KV slots, allocated here.

        `attention` holds the keys and pads ragged ones; a kind of it is made here.
        """
        self._weights = weights
        self._num_slots = num_slots
        if not isinstance(attention, PaddedAttention):
            attention = make_attention(
                attention, num_slots, dtype=weights.dtype, device=weights.device, head_dim=weights.head_dim
            )
        self._attention = attention
        self._triton = attention if isinstance(attention, TritonAttention) else None
        self._has_triton = runs_triton(weights.device)
        # Rows that were not divided yet may be too large for float16.
        self._norms_late = self._has_triton and self._triton is not None and weights.dtype != torch.float16
        self._key_tokens = KeyTokens(0, 0)
        for layer in range(len(weights.layers)):
            self._attention.allocate(layer, weights.kv_heads, weights.head_dim, weights.head_dim)
        self._shape = ModelShape(
            vocab_size=weights.vocab_size,
            max_tokens=weights.max_tokens,
            num_layers=len(weights.layers),
            kv_bytes_per_token=self._attention.bytes_per_token,
            expert_share=weights.expert_share,
        )
        self._final = weights.embedding.new_zeros(0, weights.embedding.shape[1])
        self._feature_layers: tuple[int, ...] = ()
        self._features = self._final
        self._feature_rows: Int32 | None = None

    @property
    def shape(self) -> ModelShape:
        """See `ModelRunner`."""
        return self._shape

    @property
    def num_slots(self) -> int:
        """See `ModelRunner`."""
        return self._num_slots

    @property
    def key_tokens(self) -> KeyTokens:
        """See `ModelRunner`."""
        return self._key_tokens

    def resize(self, num_slots: int) -> None:
        """Make the pool one of `num_slots`; what it held is gone."""
        self._attention.resize(num_slots)
        self._num_slots = num_slots

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._weights.device

    @property
    def heads(self) -> int:
        """Query heads of this rank."""
        return self._weights.heads

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by."""
        return self._weights.scale

    @property
    def is_sharded(self) -> bool:
        """See `CapturableRunner`."""
        return self._weights.group is not None

    @property
    def no_final(self) -> torch.Tensor:
        """See `CapturableRunner`."""
        return self._weights.embedding.new_zeros(0, self._weights.embedding.shape[1])

    @property
    def no_features(self) -> torch.Tensor:
        """See `CapturableRunner`."""
        final = self.no_final
        return final.new_zeros(0, len(self._feature_layers) * final.shape[1])

    @property
    def weights(self) -> LlamaWeights:
        """What it runs."""
        return self._weights

    @property
    def attention(self) -> PaddedAttention:
        """What holds its keys and values."""
        return self._attention

    @property
    def late_norm(self) -> torch.Tensor | None:
        """[1, hidden], a row as those whose norm attention may be left with; None where it never is."""
        row = self._weights.embedding[:1]
        first = self._weights.layers[0]
        norm = self._given(row, first.qkv, has_norms_of_heads=first.head_norms is not None)[1]
        return None if norm is None else row

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], keep: Int32) -> torch.Tensor:
        """See `ModelRunner`."""
        tokens = np.concatenate([segment.tokens for segment in segments])
        positions = np.concatenate([segment.positions for segment in segments])
        plan = self._attention.plan(segments)
        selected = self._selected(keep, len(tokens))
        adapters = self._adapters_of(segments)
        computed = self.compute(self._to_device(tokens), self._to_device(positions), plan, selected, adapters)
        return self._taken(computed, plan)

    @property
    def takes_trees(self) -> bool:
        """See `DeviceRowsRunner`."""
        return self._attention.takes_device_masks

    @torch.inference_mode()
    def forward_rows(
        self, segments: Sequence[Segment], rows: DeviceRows, keep: Int32 | None = None
    ) -> torch.Tensor:
        """See `DeviceRowsRunner`."""
        positions = np.concatenate([segment.positions for segment in segments])
        plan = self._attention.plan_rows(segments, rows)
        selected = None if keep is None else self._selected(keep, len(positions))
        tokens = tokens_of(segments, rows)
        adapters = self._adapters_of(segments)
        computed = self.compute(tokens, self._to_device(positions), plan, selected, adapters)
        return self._taken(computed, plan)

    def _adapters_of(self, segments: Sequence[Segment]) -> torch.Tensor | None:
        return None if self._weights.adapters is None else adapters_on(segments, self.device)

    def _selected(self, keep: Int32, num_rows: int) -> torch.Tensor | None:
        return None if len(keep) == num_rows and _is_range(keep) else self._to_device(keep)

    def compute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        plan: PaddedPlan,
        selected: torch.Tensor | None,
        adapters: torch.Tensor | None = None,
    ) -> Computed:
        """See `CapturableRunner`."""
        weights, adapted = self._weights, self._weights.adapters
        if adapted is not None:
            adapted.begin(adapters)
        x = weights.embedding.index_select(0, tokens)
        features = x.new_empty(len(x), len(self._feature_layers) * x.shape[1])
        rotation = weights.rotation.index_select(0, positions)
        rotated_heads = weights.heads + weights.kv_heads
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            if index in self._feature_layers:
                self._note_feature(features, index, x)
            given, norm = self._given(x, layer.qkv, has_norms_of_heads=layer.head_norms is not None)
            qkv = layer.qkv(given)
            if layer.head_norms is not None:
                _normalise_heads(qkv, layer.head_norms, rotated_heads, weights.head_dim, weights.eps)
            if index == last and selected is not None and len(selected) == 0:
                self._stored(plan, index, qkv, rotation, norm)
                return Computed(x.new_zeros(0, weights.vocab_size), x[:0], features)
            mixed = self._attended(plan, index, qkv, rotation, norm)
            if index == last and selected is not None:
                # What follows is row by row, so rows whose logits nobody wants can go.
                mixed, x = mixed.index_select(0, selected), x.index_select(0, selected)
                if adapted is not None:
                    adapted.select(selected)
            x = self._fed(layer.mlp, self._added(layer.out, x, mixed))
        final = self._normalised(x)
        return Computed(weights.head(final), final, features)

    def _fed(self, mlp: FeedForward | Mixture, x: torch.Tensor) -> torch.Tensor:
        """`x`, which nobody reads any more, plus what a feed-forward layer makes of it."""
        if isinstance(mlp, Mixture):
            return self._summed(mlp(self._normalised(x, mlp.gain))).add_(x)
        given, norm = self._given(x, mlp.gate_up)
        both = mlp.gate_up(given)
        return self._added(mlp.down, x, gate(both) if self._triton is None else gate_by_triton(both, norm))

    def _stored(
        self, plan: PaddedPlan, layer: int, qkv: torch.Tensor, turn: torch.Tensor, norm: PendingNorm | None
    ) -> None:
        """Store the rotated keys, and the values, of `qkv`."""
        if self._triton is not None:
            self._triton.store_rotated(plan, layer, qkv, turn, self._weights.heads, norm)
        else:
            self._attention.store_rotated(plan, layer, qkv, turn, self._weights.heads)

    def _attended(
        self, plan: PaddedPlan, layer: int, qkv: torch.Tensor, turn: torch.Tensor, norm: PendingNorm | None
    ) -> torch.Tensor:
        """What the rotated queries of `qkv` attend to, its own keys among them; these are stored."""
        heads, scale = self._weights.heads, self._weights.scale
        if self._triton is not None:
            return self._triton.attend_rotated(plan, layer, qkv, turn, heads, scale, norm)
        return self._attention.attend_rotated(plan, layer, qkv, turn, heads, scale)

    def _note_feature(self, features: torch.Tensor, layer: int, x: torch.Tensor) -> None:
        for part, wanted in zip(
            features.chunk(len(self._feature_layers), dim=1), self._feature_layers, strict=True
        ):
            if wanted == layer:
                part.copy_(x)

    def _taken(self, computed: Computed, plan: PaddedPlan) -> torch.Tensor:
        """Logits, float32; the rest is kept until the next forward."""
        self._key_tokens = plan.key_tokens
        self._final, self._features, self._feature_rows = computed.final, computed.features, None
        return computed.logits.float()

    def note(
        self, final: torch.Tensor, features: torch.Tensor, feature_rows: Int32, key_tokens: KeyTokens
    ) -> None:
        """See `CapturableRunner`."""
        self._final, self._key_tokens = final, key_tokens
        self._features, self._feature_rows = features, feature_rows

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """See `FeatureRunner`."""
        return self._feature_layers

    def keep_features(self, layers: Sequence[int]) -> None:
        """From now on keep the hidden states that enter these layers, for `features`."""
        self._feature_layers = tuple(layers)

    def features(self, rows: Int32) -> torch.Tensor:
        """See `FeatureRunner`."""
        rows = rows if self._feature_rows is None else self._feature_rows[rows]
        return self._features.index_select(0, self._to_device(rows))

    def embed_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `FeatureRunner`."""
        return self._weights.embedding.index_select(0, tokens)

    @property
    def hidden_scale(self) -> torch.Tensor:
        """See `HiddenStateRunner`."""
        return self._weights.head_scale

    def last_hidden(self, rows: Int32) -> torch.Tensor:
        """See `HiddenStateRunner`."""
        return self._final.index_select(0, self._to_device(rows))

    def embed(self, tokens: Int32) -> torch.Tensor:
        """See `HiddenStateRunner`."""
        return self._weights.embedding.index_select(0, self._to_device(tokens))

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `HiddenStateRunner`."""
        return self._weights.head(hidden).float()

    def _given(
        self, x: torch.Tensor, linear: AnyLinear, *, has_norms_of_heads: bool = False
    ) -> tuple[torch.Tensor, PendingNorm | None]:
        """What `linear` is to multiply for `x` [rows, hidden], and the norm its product is to have then."""
        is_late = self._norms_late and len(x) <= MOST_LATE_ROWS and not has_norms_of_heads
        if is_late and linear.is_homogeneous:
            return x, PendingNorm(x, self._weights.eps)
        return self._normalised(x, linear.gain), None

    def _normalised(self, x: torch.Tensor, gain: torch.Tensor | None = None) -> torch.Tensor:
        """RMS-normalised rows of `x` [rows, hidden] times `gain`, up to what the weights absorbed."""
        weights = self._weights
        if weights.norm_floor is None:
            if self._has_triton:
                return normalised_by_triton(x, gain, weights.eps)
            return F.rms_norm(x, (x.shape[1],), gain, weights.eps)
        # x / sqrt(mean(x^2) + eps) = sqrt(hidden) * x / hypot(|x|, sqrt(hidden * eps)); three operations
        # where `rms_norm` takes seven on a CPU.
        norm: torch.Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        normalised = x / norm.hypot_(weights.norm_floor)
        return normalised if gain is None else normalised.mul_(gain)

    def _added(self, linear: AnyLinear, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """`x`, which nobody reads any more, plus `linear` of `y`, whose units are spread over the ranks."""
        if self._weights.group is None:
            return linear.add_to(x, y)
        return self._summed(linear(y)).add_(x)

    def _summed(self, partial: torch.Tensor) -> torch.Tensor:
        """`partial`, the ranks' sum of it."""
        if self._weights.group is not None:
            torch.distributed.all_reduce(partial, group=self._weights.group)
        return partial

    def _to_device(self, indices: Int32) -> torch.Tensor:
        return to_device(torch.from_numpy(indices), self._weights.device)


def _is_range(keep: Int32) -> bool:
    return bool((keep == np.arange(len(keep))).all())


def _normalise_heads(qkv: torch.Tensor, scales: torch.Tensor, heads: int, head_dim: int, eps: float) -> None:
    """RMS-normalise each of the first `heads` heads of `qkv` in place; `scales` [heads, head_dim]."""
    part = qkv[:, : heads * head_dim].view(-1, heads, head_dim)
    part.copy_(F.rms_norm(part, (head_dim,), None, eps).mul_(scales))
