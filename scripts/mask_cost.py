"""Processor time of a grammar's masks per tree node: `python scripts/mask_cost.py [tokenizer.json ...]`.

Compiling and loading, which happen in another thread, are in wall time.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from llguidance import LLTokenizer

from engine.constraint import Constraint
from engine.grammar import Grammars
from engine.mask_bits import TokenMask
from engine.thoughtful_grammar import matcher_of
from engine.token_masks import mask_out_
from engine.tree import TokenTree
from verifier.constrained import Bounds, mask_tree
from zoo.registry import TARGET, weights_dir

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["function", "class", "module"]},
        "size": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
    },
    "required": ["name", "kind", "size", "tags"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "JSON schema": Constraint(kind="json_schema", text=json.dumps(SCHEMA)),
    "any JSON object": Constraint(kind="json_object"),
    "regex": Constraint(kind="regex", text=r"[a-z]+@[a-z]+\.(com|org)( [0-9]{3}-[0-9]{4})?"),
    "choice of 3": Constraint(kind="choice", text='["positive", "negative", "neutral"]'),
}
NODES = 16


def allowed_ids(mask: TokenMask) -> list[int]:
    """Tokens that a mask allows."""
    ids: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return ids


def measure(grammars: Grammars, constraint: Constraint, seed: int) -> tuple[float, list[float], list[float]]:
    """Seconds of compiling, of each mask along random answers, and per node of chains of allowed tokens."""
    started = time.perf_counter()
    grammars.check(constraint)
    compiled = time.perf_counter() - started
    rng = random.Random(seed)
    ends = set(grammars.tokenizer.eos_tokens)

    def choices(mask: TokenMask) -> list[int]:
        """Tokens that go on. One in two is among the few that end what is open, or answers never would."""
        found = [token for token in allowed_ids(mask) if token not in ends]
        return found[:4] if len(found) > 1000 and rng.random() < 0.5 else found

    masks, per_node = [], []
    for _ in range(12):
        matcher = matcher_of(grammars, constraint)
        for _ in range(25):
            started = time.thread_time()
            mask = matcher.allowed()
            masks.append(time.thread_time() - started)
            found = choices(mask)
            chain: list[int] = []
            while found and len(chain) < NODES - 1:
                chain.append(rng.choice(found))
                matcher.enter(chain[-1], len(chain))
                found = choices(matcher.allowed())
            matcher.leave()
            if not chain:
                break
            tree = TokenTree.chain(0, chain, [-0.1] * len(chain))
            started = time.thread_time()
            masked = mask_tree(matcher, tree, Bounds(position=0, min_tokens=0, stop=ends))
            per_node.append((time.thread_time() - started) / len(masked.tree))
            matcher.advance(chain[:1])
    return compiled, masks, per_node


def main() -> None:
    """Print a table per tokenizer."""
    for path in sys.argv[1:] or [str(weights_dir(TARGET) / "tokenizer.json")]:
        text = Path(path).read_text(encoding="utf-8")
        ends = [LLTokenizer(text).eos_token]

        def load(text: str = text, ends: list[int] = ends) -> LLTokenizer:
            return LLTokenizer(text, eos_token=ends)

        started = time.perf_counter()
        size = Grammars(load).tokenizer.vocab_size
        print(f"{path}: {size} tokens, loaded in {time.perf_counter() - started:.2f} s")
        for name, constraint in CONSTRAINTS.items():
            grammars = Grammars(load)
            assert grammars.tokenizer
            compiled, masks, per_node = measure(grammars, constraint, 0)
            p99 = statistics.quantiles(masks, n=100)[98]
            print(
                f"  {name:16} compile {1e3 * compiled:6.1f} ms"
                f"   mask median {1e6 * statistics.median(masks):5.0f} us, p99 {1e6 * p99:5.0f} us"
                f"   in a tree, per node {1e6 * statistics.median(per_node):5.0f} us"
            )
        logits = torch.randn(NODES, size)
        mask = np.full((size + 31) // 32, 0x0F0F0F0F, dtype=np.int32)
        times = []
        for _ in range(20):
            started = time.thread_time()
            mask_out_(logits, range(NODES), [mask] * NODES)
            times.append((time.thread_time() - started) / NODES)
        print(f"  applying one to a row of logits: {1e6 * statistics.median(times):.0f} us")


if __name__ == "__main__":
    main()
