"""Load-time check that a runner computes what the plain Transformers forward computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kv_cache import KVCache
from engine.runner import ModelRunner, Segment
from engine.tree import TokenTree
from engine.unsupported_model import UnsupportedModel

Int32 = NDArray[np.int32]

Reference = Callable[[Sequence[Int32]], list[torch.Tensor]]
"""Plain forward of some sequences: of each, tokens int32 [n], logits [n, vocab]."""

# Largest difference allowed, relative to the largest logit. Wrong masks, positions or slots miss by far
# more; rounding stays far below.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}

# Wider windows are not tried: the plain forward keeps logits, and scores, of as many tokens.
MOST_TESTED_WINDOW = 1024
# Of so many rows that go to experts most are right even where rounding decides.
LEAST_ROWS = 8

#: Of the longest sequences that it can do with.
_SHORTEST = 15
_TREE_PARENTS = np.array([-1, 0, 0, 1, 1, 2, 5], dtype=np.int32)


def check_runner(
    runner: ModelRunner,
    reference: Reference,
    dtype: torch.dtype,
    weights: Iterable[tuple[str, torch.Tensor]] = (),
    *,
    adapter: int = 0,
) -> None:
    """Compare `runner` with `reference`: ragged prefill, trees beside a prompt chunk, decode after commit,
    and what lies behind a sliding window.

    And with itself: a row is to be the same beside one at the end of the longest sequence.

    Writes over the KV slots of the runner, which must hold nothing yet. Both are float models of `dtype`.
    The reference's `weights`, by name, are looked through if its logits are no numbers. All rows have the
    `adapter` that the reference has, 0 for none.

    Raises:
        UnsupportedModel: if they differ by more than rounding, or the reference's logits are not finite.
    """
    shape = runner.shape
    longest = min(24, shape.max_tokens - 12, runner.num_slots // 3 - 12)
    if longest < _SHORTEST - 12:
        raise UnsupportedModel(
            f"the self-test needs {3 * _SHORTEST} KV slots (num_slots), and sequences of {_SHORTEST} tokens "
            f"(max_model_len, or as many as the model takes), not of {shape.max_tokens}"
        )
    rng = np.random.default_rng(0)
    lengths = (longest, max(2, longest // 3), max(3, longest // 2))
    sequences = [rng.integers(0, shape.vocab_size, n).astype(np.int32) for n in lengths]
    cache = KVCache(runner.num_slots, prefix_sharing=False)
    _scatter(cache)
    tolerance = _TOLERANCE[dtype]

    def compare(step: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        expected = expected.float().to(got.device)
        if not bool(torch.isfinite(expected).all()):
            raise UnsupportedModel(_why_not_finite(dtype, weights))
        error = _error((got - expected).abs(), is_routed=bool(shape.expert_share) and dtype != torch.float32)
        if not error <= tolerance * max(1.0, float(expected.abs().max())):
            raise UnsupportedModel(
                f"self-test failed at {step}: logits are {error:.3g} off the plain Transformers forward"
            )

    # 1. Prompts of different lengths in one batch.
    segments = []
    for name, tokens in enumerate(sequences):
        cache.open(str(name), tokens)
        positions = np.arange(len(tokens), dtype=np.int32)
        segments.append(_reserve(cache, str(name), tokens, positions, None, adapter))
    logits = runner.forward(segments, np.arange(sum(lengths), dtype=np.int32))
    compare("ragged prefill", logits, torch.cat(reference(sequences)))
    for name, segment in enumerate(segments):
        cache.commit(str(name), segment.slots)

    # 2. Trees on the first two sequences beside a prompt chunk on the third.
    nodes = len(_TREE_PARENTS)
    trees = [rng.integers(0, shape.vocab_size, nodes).astype(np.int32) for _ in range(2)]
    chunk = rng.integers(0, shape.vocab_size, 4).astype(np.int32)
    segments = [_tree_segment(cache, str(name), tokens, adapter) for name, tokens in enumerate(trees)]
    positions = np.arange(lengths[2], lengths[2] + 4, dtype=np.int32)
    segments.append(_reserve(cache, "2", chunk, positions, None, adapter))
    logits = runner.forward(segments, np.arange(2 * nodes + 4, dtype=np.int32))
    tree = _tree(trees[0])
    paths = [
        np.concatenate([sequences[name], tokens[tree.path(node)]])
        for name, tokens in enumerate(trees)
        for node in range(nodes)
    ]
    *ends, after = reference([*paths, np.concatenate([sequences[2], chunk])])
    compare("token tree", logits[: 2 * nodes], torch.stack([rows[-1] for rows in ends]))
    compare("prompt chunk", logits[2 * nodes :], after[-4:])

    # 3. One more token after a branch was accepted and the rest rolled back.
    branch = np.array(tree.path(nodes - 1))
    cache.commit("0", segments[0].slots[branch])
    cache.discard("0")
    accepted = np.concatenate([sequences[0], trees[0][branch]])
    token = rng.integers(0, shape.vocab_size, 1).astype(np.int32)
    segment = _reserve(cache, "0", token, np.array([len(accepted)], dtype=np.int32), None, adapter)
    first = np.zeros(1, dtype=np.int32)
    logits = runner.forward([segment], first).clone()
    compare("decode after commit", logits[0], reference([np.concatenate([accepted, token])])[0][-1])

    # 4. The same beside the longest sequence: a forward may compute what depends on it for all rows alike.
    cache.discard("0")
    segment = _reserve(cache, "0", token, segment.positions, None, adapter)
    cache.open("far", [0])
    far = _reserve(cache, "far", token, np.array([shape.max_tokens - 1], dtype=np.int32), None, adapter)
    compare("decode beside a long sequence", runner.forward([segment, far], first)[0], logits[0])

    # 5. Beyond a window: a prompt in two chunks, the second across its edge, and a tree that it has passed.
    window = shape.windows[0] if shape.windows else 0
    num_tokens = window + 9
    room = min(runner.num_slots, shape.max_tokens) - nodes
    if not window or window > MOST_TESTED_WINDOW or num_tokens > room:
        return
    for held in ("0", "1", "2", "far"):
        cache.release(held)
    tokens = rng.integers(0, shape.vocab_size, num_tokens).astype(np.int32)
    cache.open("long", tokens)
    at = np.arange(num_tokens, dtype=np.int32)
    parts = []
    for part in (at[: window - 7], at[window - 7 :]):
        segment = _reserve(cache, "long", tokens[part], part, None, adapter)
        parts.append(runner.forward([segment], np.arange(len(part), dtype=np.int32)).clone())
        cache.commit("long", segment.slots)
    segment = _tree_segment(cache, "long", trees[0], adapter)
    logits = runner.forward([segment], np.arange(nodes, dtype=np.int32))
    read = torch.cat(parts)
    plain = reference([tokens])[0]
    compare("a prompt within its window", read[:window], plain[:window])
    compare(f"a prompt longer than its window of {window} tokens", read[window:], plain[window:])
    del plain, read
    leaves = sorted(set(range(nodes)) - set(_TREE_PARENTS.tolist()))
    # One after the other: with a large vocabulary all their logits would take gigabytes.
    ends = [
        reference([np.concatenate([tokens, trees[0][tree.path(leaf)]])])[0][-1].clone() for leaf in leaves
    ]
    compare(f"token tree behind a window of {window} tokens", logits[leaves], torch.stack(ends))


def _error(differences: torch.Tensor, *, is_routed: bool) -> float:
    """The largest; of a mixture's rows in half precision the middle one's.

    By rounding alone a row may be sent to other experts, and is then another row altogether. Few rows may all
    be such.
    """
    if not is_routed:
        return float(differences.max())
    by_row = differences.reshape(-1, differences.shape[-1]).amax(dim=1)
    return float(by_row.median()) if len(by_row) >= LEAST_ROWS else 0.0


def _why_not_finite(dtype: torch.dtype, weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Why the plain Transformers forward yields no numbers, which is no fault of the runner."""
    said = "the model's logits in the plain Transformers forward are NaN or infinite"
    named = str(dtype).removeprefix("torch.")
    for name, weight in weights:
        part = weight.detach()
        # Of a weight that is spread over ranks, this one's share; eight bits have no test of their own.
        part = (part.to_local() if hasattr(part, "to_local") else part).float()
        if bool(part.isnan().any()) or (dtype != torch.float16 and not bool(part.isfinite().all())):
            return f"{said}: its weights hold NaN or infinities, first in {name}; take another copy of them"
    if dtype == torch.float16:
        return f"{said}: numbers in it are too large for float16; set `dtype: bfloat16` or `dtype: float32`"
    return f"{said} in {named}, though its weights are finite: numbers overflow on the way"


def _scatter(cache: KVCache) -> None:
    """Leave the free slots in an order without runs, so that indexing errors cannot cancel out."""
    cache.open("kept", [0])
    slots = cache.reserve("kept", cache.free_slots)
    cache.commit("kept", np.concatenate([slots[1::2], slots[::2]]))
    cache.release("kept")


def _tree(tokens: Int32) -> TokenTree:
    depth = np.array([len(_ancestors(node)) for node in range(len(tokens))], dtype=np.int32)
    return TokenTree(
        token=tokens, parent=_TREE_PARENTS, logp=np.zeros(len(tokens), dtype=np.float32), depth=depth
    )


def _ancestors(node: int) -> list[int]:
    parents = []
    while (node := int(_TREE_PARENTS[node])) >= 0:
        parents.append(node)
    return parents


def _tree_segment(cache: KVCache, name: str, tokens: Int32, adapter: int) -> Segment:
    tree = _tree(tokens)
    return _reserve(cache, name, tokens, cache.length(name) + tree.depth, tree.ancestor_mask(), adapter)


def _reserve(
    cache: KVCache,
    name: str,
    tokens: Int32,
    positions: Int32,
    visible: NDArray[np.bool_] | None,
    adapter: int,
) -> Segment:
    return Segment(
        tokens=tokens,
        positions=positions.astype(np.int32),
        slots=cache.reserve(name, len(tokens)),
        past=cache.past(name).copy(),
        visible=visible,
        adapter=adapter,
    )
