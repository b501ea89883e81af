"""Small Llama-shaped models in numpy: with few rows a forward costs calls, not arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention import PaddedAttention
from engine.experts import AnyLinear, FeedForward
from engine.llama_runner import LlamaRunner
from engine.llama_weights import LlamaLayer, LlamaWeights
from engine.runner import KeyTokens, ModelRunner, ModelShape, Segment

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]

# Multiplications of the layers up to which calls outweigh them, as measured for decision 0043.
MOST_PRODUCTS = 3_500_000
_HIDDEN = np.float32(-1e30)


def in_numpy(runner: ModelRunner) -> ModelRunner:
    """`runner`, with forwards of few rows in numpy if it is one for which that is faster.

    Logits differ by rounding between the two, so this is for models whose mistakes cost nobody a token:
    drafters.
    """
    if not isinstance(runner, LlamaRunner) or not isinstance(runner.attention, PaddedAttention):
        return runner
    weights = runner.weights
    is_plain = weights.group is None and weights.norm_floor is not None  # one process, float32
    on_host = weights.device.type == "cpu"
    layers = [(layer, layer.mlp) for layer in weights.layers]
    networks = [mlp for layer, mlp in layers if isinstance(mlp, FeedForward) and layer.head_norms is None]
    if not on_host or not is_plain or len(networks) < len(layers):
        return runner
    hidden = weights.embedding.shape[1]
    size = sum(_num_weights(mlp, hidden, weights) for mlp in networks)
    most_rows = MOST_PRODUCTS // size
    return NumpyLlamaRunner(runner, most_rows) if most_rows else runner


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """Matrices [inputs, outputs] of one layer, scales of norms included, and their biases or None.

    Queries come out scaled as attention wants them.
    """

    qkv: Float32
    out: Float32
    gate_up: Float32
    down: Float32
    biases: tuple[Float32 | None, Float32 | None, Float32 | None, Float32 | None]


class NumpyLlamaRunner:
    """`ModelRunner`: a `LlamaRunner` whose forwards of few rows numpy does, on the same keys and values."""

    def __init__(self, runner: LlamaRunner, most_rows: int) -> None:
        """Run `runner`'s model: on a CPU, in float32, in one process, without norms of heads.

        Forwards of more than `most_rows` rows are left to it.
        """
        self._runner = runner
        self._most_rows = most_rows
        weights = self._weights = runner.weights
        hidden = weights.embedding.shape[1]
        heads = weights.heads * weights.head_dim
        self._layers = [_layer(layer, hidden, heads, weights.scale) for layer in weights.layers]
        self._embedding = weights.embedding.numpy()
        self._rotation = weights.rotation.numpy()
        floor = weights.norm_floor
        assert floor is not None
        self._least_square = np.float32(float(floor) ** 2)
        self._key_tokens = runner.key_tokens

    @property
    def shape(self) -> ModelShape:
        """See `ModelRunner`."""
        return self._runner.shape

    @property
    def num_slots(self) -> int:
        """See `ModelRunner`."""
        return self._runner.num_slots

    @property
    def key_tokens(self) -> KeyTokens:
        """See `ModelRunner`."""
        return self._key_tokens

    def forward(self, segments: Sequence[Segment], keep: Int32) -> torch.Tensor:
        """See `ModelRunner`."""
        num_rows = sum([len(segment.slots) for segment in segments])
        if num_rows > self._most_rows:
            logits = self._runner.forward(segments, keep)
            self._key_tokens = self._runner.key_tokens
            return logits
        # exp overflows to infinity for gates below -88: the quotient is then the zero that it should be.
        with np.errstate(over="ignore"):
            final = self._final(segments)
        if len(keep) != num_rows:
            final = final[keep]
        with torch.inference_mode():
            return self._weights.head(torch.from_numpy(final).to(self._weights.device))

    def _final(self, segments: Sequence[Segment]) -> Float32:
        """Normalised last hidden states [rows, hidden]; keys and values of all rows are written."""
        tokens, positions, slots = _joined(segments)
        weights, attention = self._weights, self._runner.attention
        x = self._embedding[tokens]
        rotation = self._rotation[positions]
        keys = [np.concatenate((segment.past, segment.slots)) for segment in segments]
        masks = [_mask(segment) for segment in segments]
        self._key_tokens = KeyTokens(sum([len(read) for read in keys]), 0)
        rows, head_dim = len(x), weights.head_dim
        heads, kv_heads = weights.heads, weights.kv_heads
        query_width = heads * head_dim
        rotated = query_width + kv_heads * head_dim
        mixed = np.empty((rows, query_width), dtype=np.float32)
        for index, layer in enumerate(self._layers):
            storage = attention.storage(index).numpy()
            qkv_bias, out_bias, gate_up_bias, down_bias = layer.biases
            qkv = self._normalised(x) @ layer.qkv
            if qkv_bias is not None:
                qkv += qkv_bias
            pairs = qkv[:, :rotated].copy().view(np.complex64).reshape(rows, -1, head_dim // 2)
            pairs *= rotation
            turned = pairs.view(np.float32).reshape(rows, rotated)
            storage[slots] = np.concatenate((turned[:, query_width:], qkv[:, rotated:]), axis=1)
            first = 0
            for segment, read, mask in zip(segments, keys, masks, strict=True):
                last = first + len(segment.slots)
                kv = storage.take(read, axis=0)
                self._attend(turned[first:last, :query_width], kv, mask, mixed[first:last])
                first = last
            x += _map(mixed, layer.out, out_bias)
            both = _map(self._normalised(x), layer.gate_up, gate_up_bias)
            gate, up = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
            x += _map(_gated(gate, up), layer.down, down_bias)
        return self._normalised(x)

    def _attend(self, q: Float32, kv: Float32, mask: Float32 | None, out: Float32) -> None:
        """Write into `out` [rows, heads * head_dim] what the scaled queries `q` of one segment find in `kv`.

        All heads at once: for few rows a call costs more than what is computed in it.
        """
        weights, rows, num_keys = self._weights, len(q), len(kv)
        kv_heads, head_dim = weights.kv_heads, weights.head_dim
        shared = weights.heads // kv_heads
        by_head = kv.reshape(num_keys, 2, kv_heads, head_dim).transpose(1, 2, 0, 3)
        # [kv heads, rows * shared, head_dim]; of one row it is a view.
        queries = q.reshape(rows, kv_heads, shared, head_dim).transpose(1, 0, 2, 3)
        scores = queries.reshape(kv_heads, rows * shared, head_dim) @ by_head[0].transpose(0, 2, 1)
        if mask is not None:
            by_row = scores.reshape(kv_heads, rows, shared, num_keys)
            by_row += mask[:, None]
        scores -= scores.max(axis=2, keepdims=True)
        np.exp(scores, out=scores)
        mixed = scores @ by_head[1]
        mixed /= scores.sum(axis=2, keepdims=True)
        by_row = out.reshape(rows, kv_heads, shared, head_dim)
        by_row[:] = mixed.reshape(kv_heads, rows, shared, head_dim).transpose(1, 0, 2, 3)

    def _normalised(self, x: Float32) -> Float32:
        """RMS-normalised rows, up to the constants that the weights absorbed, as `LlamaRunner` does it."""
        squares = np.vecdot(x, x)[:, None]
        squares += self._least_square
        normalised: Float32 = x / np.sqrt(squares, out=squares)
        return normalised


def _joined(segments: Sequence[Segment]) -> tuple[Int32, Int32, Int32]:
    """Tokens, positions and slots of all rows."""
    if len(segments) == 1:
        return segments[0].tokens, segments[0].positions, segments[0].slots
    return (
        np.concatenate([segment.tokens for segment in segments]),
        np.concatenate([segment.positions for segment in segments]),
        np.concatenate([segment.slots for segment in segments]),
    )


def _mask(segment: Segment) -> Float32 | None:
    """[rows, keys], what to add to the scores of a segment; None if every row sees every key."""
    rows, visible = len(segment.slots), segment.visible
    if visible is None:
        if rows == 1:
            return None
        visible = np.tri(rows, dtype=np.bool_)
    mask = np.zeros((rows, len(segment.past) + rows), dtype=np.float32)
    mask[:, -visible.shape[1] :][~visible] = _HIDDEN
    return mask


def _gated(gate: Float32, up: Float32) -> Float32:
    units: Float32 = np.exp(-gate)
    units += 1.0
    np.divide(gate, units, out=units)
    units *= up
    return units


def _map(x: Float32, matrix: Float32, bias: Float32 | None) -> Float32:
    product: Float32 = x @ matrix
    if bias is not None:
        product += bias
    return product


def _layer(layer: LlamaLayer, hidden: int, heads: int, scale: float) -> _Layer:
    qkv, qkv_bias = _matrix(layer.qkv, hidden)
    qkv[:, :heads] *= np.float32(scale)
    if qkv_bias is not None:
        qkv_bias[:heads] *= np.float32(scale)
    out, out_bias = _matrix(layer.out, heads)
    assert isinstance(layer.mlp, FeedForward)
    gate_up, gate_up_bias = _matrix(layer.mlp.gate_up, hidden)
    down, down_bias = _matrix(layer.mlp.down, gate_up.shape[1] // 2)
    return _Layer(qkv, out, gate_up, down, (qkv_bias, out_bias, gate_up_bias, down_bias))


def _matrix(linear: AnyLinear, inputs: int) -> tuple[Float32, Float32 | None]:
    """A map's matrix [inputs, outputs] and bias, however it keeps them: what it makes of unit vectors."""
    with torch.inference_mode():
        bias = linear(torch.zeros(1, inputs, device="cpu"))
        matrix = linear(torch.eye(inputs, device="cpu")) - bias
    return matrix.numpy().copy(), bias.numpy()[0].copy() if bool(bias.any()) else None


def _num_weights(mlp: FeedForward, hidden: int, weights: LlamaWeights) -> int:
    query, keys = weights.heads * weights.head_dim, 2 * weights.kv_heads * weights.head_dim
    with torch.inference_mode():
        width = mlp.gate_up(torch.zeros(1, hidden, device="cpu")).shape[1]
    return hidden * (query + keys) + query * hidden + hidden * width + hidden * width // 2
