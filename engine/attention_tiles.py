"""Tiles of the attention kernel in Triton: queries and keys at a time, and in how many parts keys go."""

from __future__ import annotations

from typing import NamedTuple

import torch

#: Programs that keep a GPU with 132 processors busy, four on each, and most splits of keys for that.
ENOUGH_PROGRAMS, MOST_SPLITS = 528, 32
#: Programs of a launch without splits up to which decoding is bound by how long one program takes.
FEW_PROGRAMS = 16
#: Queries of a request and key head, one number for each tile there may be.
QUERIES = (16, 32, 64)


class Tile(NamedTuple):
    """What a program of the attention kernel works on at a time: queries, keys, stages of their loads, warps.

    A tile of keys takes three loads, one after the other: slots, keys, values. With five stages the next
    tile's keys and values are under way while one is computed with, with three its slots only.
    """

    queries: int
    keys: int
    stages: int
    warps: int = 4


def tile_of(queries: int, head_dim: int, dtype: torch.dtype, pairs: int, *, has_window: bool = False) -> Tile:
    """A tile whose sums and keys fit in the registers and the shared memory of GPUs from Ampere on.

    Args:
        queries: of a request and key head.
        head_dim: of keys.
        dtype: of keys; products of float32 are not for tensor cores, and take more registers.
        pairs: of a request and a key head, in a batch.
        has_window: whether rows see keys from one of their own on, for which one warp has no registers left.
    """
    if has_window:
        usual = tile_of(queries, head_dim, dtype, pairs)
        return usual._replace(warps=max(2, usual.warps))
    if dtype.itemsize > 2:
        return Tile(16, 32 if head_dim <= 64 else 16, 2)
    # Measured with heads of 128 on an H200 (docs/gpu.md); the others are small enough for two programs on a
    # processor that has 100 KB of shared memory.
    is_usual = 64 < head_dim <= 128
    if queries <= 16 and is_usual:
        return Tile(16, 128, 3) if pairs <= FEW_PROGRAMS else Tile(16, 32, 5, warps=1)
    if queries <= 16:
        # Five stages of heads of 512 (Gemma 4) would take 145 KB.
        return Tile(16, 64, 5) if head_dim <= 64 else Tile(16, 32, 5 if head_dim <= 256 else 3)
    if queries <= 32 and is_usual:  # trees to verify
        return Tile(32, 128, 3)
    return Tile(64, 64, 2) if head_dim <= 128 else Tile(32, 32, 2)


def num_splits(programs: int, keys: int, least: int) -> int:
    """Into how many parts each request's keys go, for a launch that has so many programs without.

    As many as keep the programs within what keeps a GPU busy, and as make the parts no longer.

    Args:
        programs: tiles of queries over all requests and key heads.
        keys: of the longest request, or a bound on it.
        least: keys of a tile, of which parts are whole numbers.

    Returns:
        1 to `MOST_SPLITS`.
    """
    tiles = -(-keys // least)
    # A tile of 128 keys keeps a processor's memory busy, or nearly.
    enough = ENOUGH_PROGRAMS // 3 if least >= 128 else ENOUGH_PROGRAMS
    length = -(-tiles // max(1, min(enough // programs, MOST_SPLITS)))
    return -(-tiles // length)
