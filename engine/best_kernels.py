"""Kernels in Triton: the few best tokens of each row of scores, with their log-probabilities.

Imported only where they are launched, since it imports Triton (see `engine.row_kernels`).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("num_blocks", "k"))
def best_of_block(scores, values, tokens, weight, vocab, num_blocks, k, BLOCK: tl.constexpr):
    """The `k` highest of one block of a row, descending, ties to the lowest token, and its softmax's weight.

    Grid: (rows, num_blocks). scores float32 [rows, vocab]; values float32 and tokens int32
    [rows, num_blocks, k]; weight float32 [rows, num_blocks, 2]: highest score, and the sum of exponentials
    of scores less that.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(scores + row * vocab + token, mask=token < vocab, other=-float("inf"))
    # Of what is no number any place might be found the highest, one behind the vocabulary, too.
    score = tl.where(score == score, score, -float("inf"))
    highest = tl.max(score, 0)
    base = tl.where(highest == -float("inf"), 0.0, highest)
    line = row * num_blocks + block
    tl.store(weight + line * 2, highest)
    tl.store(weight + line * 2 + 1, tl.sum(tl.exp(score - base), 0))
    for choice in range(k):
        value = tl.max(score, 0)
        place = tl.argmax(score, 0)
        tl.store(values + line * k + choice, value)
        tl.store(tokens + line * k + choice, block * BLOCK + place)
        score = tl.where(token == block * BLOCK + place, -float("inf"), score)


@triton.jit(
    do_not_specialize=("num_blocks", "k"), do_not_specialize_on_alignment=("out_values", "out_tokens")
)
def best_of_blocks(
    values,
    tokens,
    weight,
    out_values,
    out_tokens,
    num_blocks,
    k,
    BLOCKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """The `k` highest of a row from those of its blocks, as log-probabilities.

    Grid: (rows,). Inputs as `best_of_block` leaves them; out_values float32 and out_tokens int64 [rows, k].
    BLOCKS, CANDIDATES: powers of two that hold num_blocks, and num_blocks * k.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    at = weight + (row * num_blocks + block) * 2
    highest = tl.load(at, mask=is_block, other=-float("inf"))
    total = tl.load(at + 1, mask=is_block, other=0.0)
    top = tl.max(highest, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    log_total = tl.log(tl.sum(total * tl.exp(highest - base), 0))
    candidate = tl.arange(0, CANDIDATES)
    is_candidate = candidate < num_blocks * k
    first = row * num_blocks * k
    value = tl.load(values + first + candidate, mask=is_candidate, other=-float("inf"))
    # Blocks are in the order of tokens, and so are ties within one: the first of equals is the lowest token.
    for choice in range(k):
        found = tl.max(value, 0)
        place = tl.argmax(value, 0)
        tl.store(out_values + row * k + choice, (found - base) - log_total)
        token = tl.load(tokens + first + place)
        tl.store(out_tokens + row * k + choice, token.to(tl.int64))
        value = tl.where(candidate == place, -float("inf"), value)
