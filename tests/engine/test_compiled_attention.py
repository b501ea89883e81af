"""Triton's kernels of a forward, compiled for GPUs: what they take of a processor, and what is under way."""

from __future__ import annotations

import re

import pytest
import torch

from engine.attention_tiles import MOST_SPLITS, tile_of
from tests.engine.compiling import Kernel, compiled

pytest.importorskip("triton")
#: Bytes that a thread keeps in memory: ten numbers, with which one warp was still the fastest on an H200.
FEW_BYTES = 40


def attend(
    dtype: str,
    head_dim: int,
    queries: int,
    *,
    is_split: bool,
    arch: int = 90,
    pairs: int = 512,
    is_new: bool = False,
    norm: int = 0,
    is_special: bool = False,
) -> Kernel:
    """The attention kernel with the tile it is launched with, for 8 key heads of 4 query heads each.

    It rotates and stores keys itself if `is_new`, of rows with a norm of size `norm`. With `is_special`
    layers have windows, sinks and capped scores.
    """
    name = {"bfloat16": "*bf16", "float32": "*fp32"}[dtype]
    sums = "*fp32" if is_split else name
    types = {"q": name, "rotation": "*fp32" if is_new else name, "x": name, "storage": name, "out": name}
    types |= {"partial": sums, "weight": sums}
    types |= {"segments": "*i32", "slots": "*i32", "seen": "*u8", "scale": "fp32"}
    numbers = (
        "q_row_stride",
        "q_head_stride",
        "storage_stride",
        "num_rows",
        "num_splits",
        "num_segments",
        "x_stride",
        "size",
    )
    tile = tile_of(queries, head_dim, getattr(torch, dtype), pairs, has_window=is_special)
    sizes = {"KV_HEADS": 8, "SHARED": 4, "K_DIM": head_dim, "V_DIM": head_dim, "K_BLOCK": head_dim}
    sizes |= {"V_BLOCK": head_dim, "QUERIES": tile.queries, "KEYS": tile.keys, "IS_SPLIT": is_split}
    sizes |= {"IS_TILED": queries > tile.queries, "IS_NEW": is_new, "NORM_BLOCK": norm}
    sizes |= dict.fromkeys(("HAS_WINDOW", "HAS_SINKS", "HAS_CAP"), is_special)
    special = {"positions": "*i32", "sinks": name, "window": "i32", "cap": "fp32"}
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "arch": arch}
    return (
        "engine.attention_kernels.attend",
        types | dict.fromkeys(numbers, "i32") | {"eps": "fp32"} | special,
        sizes,
        options,
    )


@pytest.mark.thorough
def test_kernels_compile_for_gpus() -> None:
    """By Triton's own compiler, which needs no GPU: code for Ampere and Hopper that fits there."""
    partial = {"partial": "*fp32", "weight": "*fp32", "out": "*bf16", "num_lines": "i32", "num_splits": "i32"}
    heads = {"qkv": "*bf16", "rotation": "*fp32", "storage": "*bf16", "slots": "*i64"}
    rows = {"x_stride": "i32", "size": "i32", "eps": "fp32"}
    heads |= {"qkv_stride": "i32", "storage_stride": "i32", "x": "*bf16"} | rows
    gates = {"gate_up": "*bf16", "out": "*bf16", "units": "i32", "x": "*bf16"} | rows
    norm = {"x": "*bf16", "gain": "*bf16", "out": "*bf16", "size": "i32", "x_stride": "i32", "eps": "fp32"}
    masks = {"segments": "*i32", "committed": "*i64", "laid": "*u8", "seen": "*u8"}
    masks |= dict.fromkeys(("rows", "laid_out", "columns"), "i32")
    attending = compiled(
        [
            attend("bfloat16", 128, 4, is_split=True),
            attend("bfloat16", 128, 64, is_split=False),
            attend("bfloat16", 128, 64, is_split=False, arch=80),
            attend("float32", 64, 4, is_split=True),
            attend("bfloat16", 512, 4, is_split=True, arch=80),  # Gemma 4
            attend("bfloat16", 128, 4, is_split=True, pairs=8, is_new=True, norm=4096),
            attend("bfloat16", 128, 4, is_split=True, is_new=True, arch=80),
            attend("bfloat16", 64, 8, is_split=True, is_special=True),  # gpt-oss
            attend("bfloat16", 128, 4, is_split=True, is_special=True, arch=80),
            attend("bfloat16", 256, 64, is_split=False, is_special=True),  # Gemma 3
        ]
    )
    tiled = compiled(
        [
            attend("bfloat16", head_dim, 256, is_split=True, arch=arch)
            for head_dim, arch in [(64, 90), (128, 80), (128, 90), (256, 90)]
        ]
        + [
            attend("bfloat16", head_dim, 256, is_split=True, arch=arch, is_special=True)
            for head_dim, arch in [(64, 90), (128, 80), (256, 90)]
        ]
    )
    others = compiled(
        [
            (
                "engine.attention_kernels.combine",
                partial,
                {"V_DIM": 128, "V_BLOCK": 128, "SPLITS": MOST_SPLITS},
                {"num_warps": 4},
            ),
            (
                "engine.row_kernels.rotate_and_store",
                heads,
                {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "HALF_BLOCK": 64, "NORM_BLOCK": 4096},
                {"num_warps": 4},
            ),
            ("engine.row_kernels.gate", gates, {"BLOCK": 1024, "NORM_BLOCK": 4096}, {"num_warps": 4}),
            ("engine.row_kernels.normalise", norm, {"BLOCK": 4096, "HAS_GAIN": True}, {"num_warps": 8}),
            ("engine.attention_kernels.see", masks, {"BYTES": 1024}, {"num_warps": 4}),
        ]
    )
    for kernel in attending + tiled + others:
        assert kernel.spilled <= (FEW_BYTES if kernel not in tiled else 2 * FEW_BYTES)
        assert kernel.shared <= 99 << 10  # of the smallest GPUs
    for kernel in attending:
        assert "cp.async" in kernel.ptx
    assert "mma.sync" in attending[0].ptx
    assert "wgmma.mma_async" in attending[1].ptx


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("head_dim", "least"),
    [
        pytest.param(64, 2, marks=pytest.mark.thorough),
        (128, 2),
        pytest.param(256, 1, marks=pytest.mark.thorough),
    ],
)
def test_a_tile_of_decoding_is_computed_while_the_next_is_under_way(head_dim: int, least: int) -> None:
    """Two buffers of keys and of values, and waits that leave copies under way; fits the smallest GPUs."""
    kinds = [(arch, is_special) for arch in (80, 90) for is_special in (False, True)]
    for kernel in compiled(
        [attend("bfloat16", head_dim, 4, is_split=True, arch=a, is_special=special) for a, special in kinds]
    ):
        buffers = re.findall(r"local_alloc[^\n]*memdesc<(\d)x\d+x\d+xbf16[^\n]*mutable", kernel.ttgir)
        assert buffers == ["2", "2"] * 2  # of tiles without masks, and of those with
        waits = [int(number) for number in re.findall(r"async_wait[^\n]*num = (\d+)", kernel.ttgir)]
        assert sum(number > 0 for number in waits) >= 2  # for the slots, the keys, the values
        assert kernel.spilled <= FEW_BYTES
        assert kernel.fitting(100 << 10) >= least
