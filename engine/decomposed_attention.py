"""Attention over decomposed requests: partial softmaxes, merged exactly (SPIN, section V-A)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention import PaddedAttention, PaddedPlan
from engine.decomposition import AttentionCost, Decomposition, cheapest, stitch
from engine.pieces import Pieces, lay_out
from engine.rectangles import first_rows, key_counts, partition
from engine.runner import KeyTokens, Segment

# In units of one score of one query row over all heads. `flotilla bench decomposition` measures them; in
# these units they hardly depend on the numbers and sizes of heads (docs/decomposition.md).
COST = AttentionCost(gather=4, group=1000, merge=50, merging=1500)

# Shorter rows than this make the kernel slower than their padding would.
SHORTEST_ROW = 64


@dataclass(frozen=True, slots=True, eq=False)
class DecomposedPlan(PaddedPlan):
    """A `PaddedPlan` some of whose segments are cut into pieces instead."""

    decomposed: list[Pieces]


class DecomposedAttention(PaddedAttention):
    """`PaddedAttention` that cuts long segments into rows of a common length, so that little is padded.

    Each piece is attended to on its own, which gives a result and the logarithm of its softmax's
    denominator; the denominators of a request's pieces are summed (SPIN's equation 13), and the results
    weighed with their shares of the sum. That is the same to rounding.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        when_cheaper: bool = False,
        stitched: bool = False,
    ) -> None:
        """As `PaddedAttention`.

        Args:
            num_slots: KV slots of the pool.
            dtype: of keys and values.
            device: where they lie.
            when_cheaper: decompose only what that makes cheaper by `COST`.
            stitched: let pieces of two segments share a row, as many rows as segments. Only to measure what
                that costs: values of one request that are not finite would spoil the other's.
        """
        super().__init__(num_slots, dtype=dtype, device=device)
        self._when_cheaper = when_cheaper
        self._stitched = stitched

    def plan(self, segments: Sequence[Segment]) -> PaddedPlan:
        """See `AttentionBackend`."""
        if len(segments) == 1:
            return super().plan(segments)
        starts = first_rows(segments)
        counts = key_counts(segments)
        grouped: list[list[int]] = []
        decomposed: list[Pieces] = []
        keys_read = 0
        for members in _alike(segments, counts):
            rectangles = [[members[i] for i in group] for group in partition([segments[m] for m in members])]
            cut = self._cut(segments, members, rectangles, counts)
            if cut is None:
                grouped += rectangles
                keys_read += sum(len(group) * max(counts[index] for index in group) for group in rectangles)
            else:
                decomposed.append(
                    lay_out(
                        [segments[index] for index in members],
                        [starts[index] for index in members],
                        starts[-1],
                        cut,
                        dtype=self._dtype,
                        device=self._device,
                    )
                )
                keys_read += cut.num_rows * cut.row_length
        if not decomposed:
            return super().plan(segments)
        write = np.concatenate([segment.slots for segment in segments]).astype(np.int64)
        return DecomposedPlan(
            num_rows=starts[-1],
            write=self._tensor(write),
            groups=[self._group(segments, members, starts) for members in grouped],
            key_tokens=KeyTokens(sum(counts), keys_read - sum(counts)),
            decomposed=decomposed,
        )

    def attend(
        self, plan: PaddedPlan, layer: int, q: torch.Tensor, scale: float | None = None
    ) -> torch.Tensor:
        """See `AttentionBackend`."""
        if not isinstance(plan, DecomposedPlan) or not plan.decomposed:
            return super().attend(plan, layer, q, scale)
        if plan.decomposed[0].target is None:
            return self._attend_pieces(plan.decomposed[0], layer, q, scale)
        out = q.new_empty(plan.num_rows, q.shape[1] * self._shapes[layer][2])
        self._attend_groups(plan.groups, layer, q, scale, out)
        for pieces in plan.decomposed:
            assert pieces.target is not None
            out.index_copy_(0, pieces.target, self._attend_pieces(pieces, layer, q, scale))
        return out

    def _cut(
        self,
        segments: Sequence[Segment],
        members: list[int],
        rectangles: list[list[int]],
        counts: list[int],
    ) -> Decomposition | None:
        """How to cut the segments `members`, which the groups `rectangles` would hold; None not to."""
        lengths = [counts[index] for index in members]
        if self._stitched:
            cut = stitch(lengths, len(members))
            return cut if cut.is_split else None
        queries = max(len(segments[index].slots) for index in members)
        padded = math.inf
        if self._when_cheaper:
            padded = sum(
                COST.rectangle(
                    len(group),
                    max(len(segments[index].slots) for index in group),
                    max(counts[index] for index in group),
                )
                for group in rectangles
            )
            # Not even without any padding: no need to search.
            if padded <= COST.pieces(len(lengths), queries, sum(lengths)):
                return None
        cut, cost = cheapest(lengths, queries, COST, SHORTEST_ROW)
        return cut if cut.is_split and cost < padded else None

    def _attend_pieces(
        self, pieces: Pieces, layer: int, q: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Merged results, [batch rows of these segments, q_heads * v_dim]."""
        kv_heads, k_dim, v_dim = self._shapes[layer]
        shared = q.shape[1] // kv_heads
        indices = pieces.indices(kv_heads, shared)
        asked = q.reshape(-1, k_dim).index_select(0, indices.ask)
        asked = asked.view(pieces.rows, kv_heads, pieces.queries * shared, k_dim)
        mask = pieces.folded_mask(shared)
        parts = [
            partial_attention(asked[part], k, v, None if mask is None else mask[part], scale)
            for part, k, v in self._gathered(pieces.read, layer, pieces.rows)
        ]
        results = torch.cat([part.reshape(-1, v_dim) for part, _ in parts])
        logarithms = torch.cat([part.reshape(-1) for _, part in parts])
        shares = logarithms.index_select(0, indices.partial)
        if pieces.hidden is not None:
            shares = shares.view(len(pieces.hidden), pieces.num_merged, -1) + pieces.hidden
        weights = torch.softmax(shares.view(-1, pieces.num_merged * q.shape[1]), dim=0)
        if results.dtype != weights.dtype:
            results = results.to(weights.dtype)  # so that half precision rounds once, after the sum
        merged = F.embedding_bag(  # weighted sums of rows
            indices.result,
            results,
            indices.first,
            mode="sum",
            per_sample_weights=weights.view(-1).index_select(0, indices.weight),
        )
        return merged.view(pieces.num_merged, -1).to(q.dtype)


def partial_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries [b, heads, n, k_dim] to some of their keys, and what merging it needs.

    Args:
        q: queries.
        k: keys [b, heads, m, k_dim].
        v: values [b, heads, m, v_dim].
        mask: to add to the scores, [b, 1, n, m], finite; or None.
        scale: multiplies the scores; None is `k_dim ** -0.5`.

    Returns:
        The results [b, heads, n, v_dim], and the logarithm of the sum of the exponentials of the scores,
        [b, heads, n]; float32, or float64 if the queries are.
    """
    if q.device.type == "cpu" and q.shape[3] == v.shape[3]:
        # What `scaled_dot_product_attention` calls on a CPU; the public function drops the logarithms.
        results, logarithms = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=mask, scale=scale
        )
        return results, logarithms
    scores = torch.matmul(q, k.transpose(2, 3)) * (q.shape[3] ** -0.5 if scale is None else scale)
    if scores.dtype != torch.float64:
        scores = scores.float()
    if mask is not None:
        scores += mask
    logarithms = torch.logsumexp(scores, dim=3)
    return torch.matmul(torch.softmax(scores, dim=3).to(v.dtype), v), logarithms


def _alike(segments: Sequence[Segment], counts: list[int]) -> list[list[int]]:
    """Segments with so similar numbers of query rows that padding those costs less than another rectangle."""
    order = sorted(range(len(segments)), key=lambda index: len(segments[index].slots), reverse=True)
    classes: list[list[int]] = []
    rows = padding = 0
    for index in order:
        queries = len(segments[index].slots)
        padding += (rows - queries) * counts[index]
        if classes and padding <= COST.group + COST.merging:
            classes[-1].append(index)
        else:
            classes.append([index])
            rows, padding = queries, 0
    return [sorted(members) for members in classes]
