"""The constants of the cost model of attention, fitted on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from benchmarks import decomposition_lengths, tables
from benchmarks.decomposition_attention import SwitchedAttention
from benchmarks.decomposition_setting import Shape, make_segments
from engine.decomposed_attention import COST
from engine.decomposition import AttentionCost

# Requests, and query rows of each.
_BATCHES = ((16, 1), (16, 4), (16, 8), (32, 4))
_ROW_LENGTHS = (64, 128, 192, 256, 384, 768)
_REPEATS = 7


def fit_costs(shapes: Sequence[Shape], seed: int) -> list[dict[str, Any]]:
    """Fit the cost model to attention alone, in one layer of each shape; prints and returns the constants.

    Grouped, and decomposed with rows of several lengths; least squares of relative errors.
    """
    found: list[dict[str, Any]] = []
    for shape in shapes:
        features, seconds = _measure(shape, seed)
        weighted = features / seconds[:, None]
        # Scaled to columns of one size, for the solver's sake.
        size = np.maximum(weighted.max(axis=0), 1e-12)
        solution = nnls(weighted / size, np.ones(len(seconds)))[0] / size
        error = float(np.abs(features @ solution / seconds - 1.0).mean())
        gather, score, group, merge, merging = (float(value) for value in solution)
        unit = max(score, 1e-12)
        cost = AttentionCost(gather / unit, group / unit, merge / unit, merging / unit)
        found.append(
            {
                "shape": shape.name,
                "score_us": score * 1e6,
                "gather": cost.gather,
                "group": cost.group,
                "merge": cost.merge,
                "merging": cost.merging,
                "mean_error": error,
            }
        )
    rows = [
        [
            str(entry["shape"]),
            tables.number(entry["score_us"], 4),
            *(tables.number(entry[name], 1) for name in ("gather", "group", "merge", "merging")),
            tables.percent(entry["mean_error"]),
        ]
        for entry in found
    ]
    used = [tables.number(value, 1) for value in (COST.gather, COST.group, COST.merge, COST.merging)]
    heads = ["", "score us", "gather", "group", "merge", "merging", "mean error"]
    title = "Cost model of one layer's attention, in scores of one query row"
    tables.console.print(tables.plain_table(title, heads, [*rows, ["used", "", *used, ""]]))
    return found


@torch.inference_mode()
def _measure(shape: Shape, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Terms of the cost model float64 [n, 5], and processor seconds of one layer's attention [n]."""
    rng = np.random.default_rng(seed)
    draw = decomposition_lengths.source(None)
    features, seconds = [], []
    for batch, rows in _BATCHES:
        contexts = draw(rng, batch)
        segments = make_segments(rng, contexts, rows)
        num_slots = sum(contexts) + batch * rows
        attention = SwitchedAttention(num_slots, dtype=torch.float32)
        attention.allocate(0, shape.kv_heads, shape.head_dim, shape.head_dim)
        attention.fill(torch.Generator().manual_seed(seed))
        q = torch.randn(batch * rows, shape.heads, shape.head_dim)
        attention.method = "grouped"
        plans = [attention.plan(segments)]
        groups = plans[0].groups
        scores = sum(group.segments * group.keys * group.rows for group in groups)
        features.append([sum(plans[0].key_tokens), scores, len(groups), 0, 0])
        attention.method = "decomposed"
        for length in _ROW_LENGTHS:
            attention.row_length = length
            plan = attention.plan(segments)
            plans.append(plan)
            keys = sum(plan.key_tokens)
            features.append([keys, keys * rows, 1, keys // length * rows, 1])
        times = np.empty((_REPEATS, len(plans)))
        for repeat in range(-1, _REPEATS):
            for index, plan in enumerate(plans):
                begun = time.thread_time()
                attention.attend(plan, 0, q)
                if repeat >= 0:
                    times[repeat, index] = time.thread_time() - begun
        seconds += np.median(times, axis=0).tolist()
    return np.array(features, dtype=np.float64), np.array(seconds)
