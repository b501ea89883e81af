"""The attention of a runner, by name and by what its device can do."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from engine.attention import PaddedAttention
from engine.decomposed_attention import DecomposedAttention
from engine.flashinfer_attention import FlashInferAttention, why_not_flashinfer
from engine.triton_attention import TritonAttention
from engine.triton_support import why_not_triton

AttentionKind = Literal["padded", "decomposed", "flashinfer", "triton", "auto"]
"""`padded` groups keys by shape, `decomposed` cuts them into pieces, `flashinfer` and `triton` read them
where they lie, on CUDA. `auto` on CUDA is `triton`, which was the faster one wherever both were measured
(docs/gpu.md); without Triton `flashinfer` where that is installed and has such kernels, else `padded`.
On a CPU it is padded or decomposed, whichever costs less in a forward."""


def make_attention(
    kind: AttentionKind | None,
    num_slots: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    head_dim: int | None = None,
) -> PaddedAttention:
    """The attention of a runner.

    Args:
        kind: which; None is `auto` on CUDA and `padded` elsewhere.
        num_slots: KV slots of its pool.
        dtype: of keys and values.
        device: where they lie.
        head_dim: of the model, if known: what `auto` decides by.

    Raises:
        ValueError: if there is no such kind, or it cannot be used there.
    """
    device = torch.device(device)
    if kind is None:
        kind = "auto" if device.type == "cuda" else "padded"
    if kind not in get_args(AttentionKind):
        raise ValueError(f"attention must be one of {', '.join(get_args(AttentionKind))}, not {kind!r}")
    if kind == "auto" and device.type == "cuda":
        if why_not_triton(device) is None:
            kind = "triton"
        else:
            kind = "padded" if why_not_flashinfer(dtype, device, head_dim) else "flashinfer"
    if kind == "flashinfer":
        return FlashInferAttention(num_slots, dtype=dtype, device=device)
    if kind == "triton":
        return TritonAttention(num_slots, dtype=dtype, device=device)
    if kind == "padded":
        return PaddedAttention(num_slots, dtype=dtype, device=device)
    return DecomposedAttention(num_slots, dtype=dtype, device=device, when_cheaper=kind == "auto")
