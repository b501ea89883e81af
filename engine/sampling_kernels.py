"""Kernels in Triton: temperature, truncation and Gumbel noise of rows of logits.

Imported only where they are launched, since it imports Triton (see `engine.row_kernels`). What a row
asks for is a line of eight int32: its seed (two words), its output position, top_k (0 for all tokens), and
the bits of three float32: temperature (0 for a greedy row), the natural logarithm of min_p without its sign
(infinity for none) and top_p (1 for all tokens); the last is not used.

A token's *key* is the integer that the bits of its score's magnitude make, where scores are at most 0: the
lower the key, the more probable the token. So every cut is the highest key that is kept.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gumbel(seed, position, first_token, TOKENS: tl.constexpr):
    """float32 [TOKENS], noise of tokens from `first_token` on, a multiple of 4; see `engine.noise`."""
    block = first_token // 4 + tl.arange(0, TOKENS // 4)
    zero = block * 0
    a, b, c, d = tl.philox(seed, block, zero + position, zero, zero)
    # Of a block's four words each belongs to one token, in their order.
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [TOKENS])
    uniform = (words.to(tl.uint32, bitcast=True).to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def gumbel(out, positions, seeds, vocab, TOKENS: tl.constexpr):
    """Noise of whole rows. Grid: (rows, ceil(vocab / TOKENS)).

    out float32 [rows, vocab]; positions and seeds int64 [rows].
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TOKENS
    token = first + tl.arange(0, TOKENS)
    noise = _gumbel(tl.load(seeds + row), tl.load(positions + row).to(tl.int32), first, TOKENS)
    tl.store(out + row * vocab + token, noise, mask=token < vocab)


@triton.jit
def _key(score):
    return tl.abs(score).to(tl.uint32, bitcast=True)


@triton.jit
def _least_key(scaled, vocab, most_key, wanted, COUNTS: tl.constexpr, TOKENS: tl.constexpr):
    """The lowest key such that tokens up to it weigh what is `wanted`, or more; two bits a pass over the row.

    A token with a key above `most_key` weighs nothing, any other 1 if COUNTS and else its exponential.
    """
    found = tl.full([], 0, dtype=tl.uint32)
    step = tl.full([], 1 << 30, dtype=tl.uint32)
    for _ in range(16):
        first = found + (step - 1)
        second = first + step
        third = second + step
        one = tl.zeros([TOKENS], dtype=tl.float32)
        two = tl.zeros([TOKENS], dtype=tl.float32)
        three = tl.zeros([TOKENS], dtype=tl.float32)
        for start in range(0, vocab, TOKENS):
            token = start + tl.arange(0, TOKENS)
            score = tl.load(scaled + token, mask=token < vocab, other=-float("inf"))
            key = _key(score)
            weight = tl.where(key <= most_key, 1.0 if COUNTS else tl.exp(score), 0.0)
            one += tl.where(key <= first, weight, 0.0)
            two += tl.where(key <= second, weight, 0.0)
            three += tl.where(key <= third, weight, 0.0)
        found += tl.where(tl.sum(one, 0) < wanted, step, 0)
        found += tl.where(tl.sum(two, 0) < wanted, step, 0)
        found += tl.where(tl.sum(three, 0) < wanted, step, 0)
        step = step >> 2
    return found


@triton.jit
def scale_and_find_cuts(scores, out, table, keys, vocab, TOKENS: tl.constexpr):
    """Scores by the temperature, 0 for the highest, and the last key that min_p, top_k and top_p keep.

    Grid: (rows,). scores and out float32 [rows, vocab], which may be the same; table int32 [rows, 8]; keys
    int32 [rows]. Nothing is written for greedy rows.
    """
    row = tl.program_id(0).to(tl.int64)
    about = table + row * 8
    temperature = tl.load(about + 4).to(tl.float32, bitcast=True)
    if temperature == 0.0:
        return
    top_k = tl.load(about + 3)
    least = tl.load(about + 5).to(tl.uint32, bitcast=True)
    top_p = tl.load(about + 6).to(tl.float32, bitcast=True)
    scores += row * vocab
    out += row * vocab
    best = tl.full([TOKENS], -float("inf"), dtype=tl.float32)
    for start in range(0, vocab, TOKENS):
        token = start + tl.arange(0, TOKENS)
        best = tl.maximum(best, tl.load(scores + token, mask=token < vocab, other=-float("inf")))
    highest = tl.max(best, 0)
    for start in range(0, vocab, TOKENS):
        token = start + tl.arange(0, TOKENS)
        score = tl.load(scores + token, mask=token < vocab, other=-float("inf"))
        # Rounded as torch rounds it: an approximate quotient would be another distribution.
        tl.store(out + token, tl.div_rn(score - highest, temperature), mask=token < vocab)
    tl.debug_barrier()  # what other threads have written is read from here on
    if top_k > 0:
        least = tl.minimum(least, _least_key(out, vocab, 0x7F800000, top_k.to(tl.float32), True, TOKENS))
    if top_p < 1.0:
        mass = tl.zeros([TOKENS], dtype=tl.float32)
        for start in range(0, vocab, TOKENS):
            token = start + tl.arange(0, TOKENS)
            score = tl.load(out + token, mask=token < vocab, other=-float("inf"))
            mass += tl.where(_key(score) <= least, tl.exp(score), 0.0)
        wanted = tl.sum(mass, 0) * top_p
        least = tl.minimum(least, _least_key(out, vocab, least, wanted, False, TOKENS))
    tl.store(keys + row, least.to(tl.int32, bitcast=True))


@triton.jit
def cut_and_perturb(scores, out, table, seeds, keys, vocab, IS_PERTURBED: tl.constexpr, TOKENS: tl.constexpr):
    """The cut that `scale_and_find_cuts` has found, and the noise if IS_PERTURBED; greedy rows are copied.

    Grid: (rows, ceil(vocab / TOKENS)). seeds: int64 [rows, 4], the table seen so; the rest as above, out as
    it was left.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TOKENS
    token = first + tl.arange(0, TOKENS)
    is_token = token < vocab
    scores += row * vocab + token
    out += row * vocab + token
    if tl.load(table + row * 8 + 4) == 0:
        tl.store(out, tl.load(scores, mask=is_token, other=0.0), mask=is_token)
        return
    score = tl.load(out, mask=is_token, other=-float("inf"))
    score = tl.where(_key(score) <= tl.load(keys + row).to(tl.uint32, bitcast=True), score, -float("inf"))
    if IS_PERTURBED:
        score += _gumbel(tl.load(seeds + row * 4), tl.load(table + row * 8 + 2), first, TOKENS)
    tl.store(out, score, mask=is_token)
