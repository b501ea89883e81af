"""Beam search over a drafter's table for a whole batch at once; the same trees as `engine.beam` grows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from drafters.messages import DraftPlan
from engine.stop_rules import StopRule
from engine.tree import TokenTree
from simulator.scripts import DrafterTable

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]


def grow(
    table: DrafterTable,
    roots: Int64,
    tokens: Int64,
    plans: Sequence[DraftPlan],
    stop_rule: StopRule | None = None,
    end_token: int = -1,
) -> tuple[list[TokenTree], list[int]]:
    """Candidate trees of requests that are drafted for with one width.

    Args:
        table: of the drafter.
        roots: int64 [requests], rows of the contexts after their last tokens.
        tokens: int64 [requests], those tokens.
        plans: one per request; all of one width, all at least one layer deep.
        stop_rule: ends all trees at the layer after which another is predicted not to pay.
        end_token: ends an answer, so nothing is drafted after it.

    Returns:
        the trees, and for each layer how many requests had a forward for it.
    """
    width = plans[0].width
    if width == 1:
        return _grow_chains(table, roots, tokens, plans, stop_rule, end_token)
    n, deepest = len(plans), max(plan.depth for plan in plans)
    limit, stops_below, token_stops_below = _ends(plans)
    stopping = stop_rule.begin() if stop_rule is not None else None

    token = np.empty((n, 1 + deepest * width), dtype=np.int32)
    parent = np.empty((n, 1 + deepest * width), dtype=np.int32)
    logp = np.zeros((n, 1 + deepest * width), dtype=np.float32)
    token[:, 0], parent[:, 0] = tokens, -1
    depth, forwards = np.zeros(n, dtype=np.int64), []
    active = np.ones(n, dtype=np.bool_)
    path: Float64 = np.zeros((n, 1))
    rows: Int64 = roots[:, None]
    layer, start, each, has_ended = 0, 1, np.arange(n)[:, None], False
    num_active = n
    while layer < deepest and num_active:
        layer += 1
        forwards.append(num_active)
        own = table.logp[rows, :width]
        after = table.next[rows, :width]
        said = table.token[rows, :width]
        children = path[:, :, None] + own
        if rows.shape[1] == 1:
            path, next_rows, chosen, said_logp = children[:, 0], after[:, 0], said[:, 0], own[:, 0]
            above = 0 if layer == 1 else start - width
            parent[:, start : start + width] = above
        else:
            flat = children.reshape(n, -1)
            order = (-flat).argsort(axis=1, kind="stable")[:, :width]
            path = flat[each, order]
            next_rows = after.reshape(n, -1)[each, order]
            chosen = said.reshape(n, -1)[each, order]
            said_logp = own.reshape(n, -1)[each, order]
            parent[:, start : start + width] = order // width + (start - width)
        token[:, start : start + width] = chosen
        logp[:, start : start + width] = path
        depth += active
        if stopping is not None:
            stopping.correct(_chances(path[active]))
        active &= limit > layer
        if stops_below is not None:
            active &= path[:, 0] >= stops_below
        if token_stops_below is not None:
            # What is not extended has no children that could be among the best.
            path = np.where(said_logp >= token_stops_below[:, None], path, -np.inf)
        ended = chosen == end_token
        if np.count_nonzero(ended):
            path = np.where(ended, -np.inf, path)
            has_ended = True
        if token_stops_below is not None or has_ended:
            active &= path.max(axis=1) > -np.inf
        num_active = int(np.count_nonzero(active))
        if stopping is not None and num_active and not stopping.pays(_chances(path[active])):
            active[:] = False
            num_active = 0
        rows, start = next_rows, start + width
    depths = np.zeros(start, dtype=np.int32)
    depths[1:] = np.arange(1, layer + 1).repeat(width)
    sizes = (1 + depth * width).tolist()
    trees = [
        TokenTree(token=t[:size], parent=p[:size], logp=v[:size], depth=depths[:size])
        for t, p, v, size in zip(token, parent, logp, sizes, strict=True)
    ]
    if token_stops_below is not None or has_ended:
        trees = [tree.subset(np.flatnonzero(tree.logp > -np.inf).astype(np.int32)) for tree in trees]
    return trees, forwards


def _chances(path: Float64) -> list[float]:
    """Probabilities of paths, but for those that do not go on."""
    chances: list[float] = np.exp(path[path > -np.inf]).tolist()
    return chances


def _grow_chains(
    table: DrafterTable,
    roots: Int64,
    tokens: Int64,
    plans: Sequence[DraftPlan],
    stop_rule: StopRule | None,
    end_token: int,
) -> tuple[list[TokenTree], list[int]]:
    """As `grow` for beams of one node, most of all drafts: nothing is sorted, and columns are read alone."""
    n, deepest = len(plans), max([plan.depth for plan in plans])
    limit, stops_below, token_stops_below = _ends(plans)
    stopping = stop_rule.begin() if stop_rule is not None else None
    first_logp, first_token, first_next = table.logp[:, 0], table.token[:, 0], table.next[:, 0]

    # [layers, requests]: a layer is written at once.
    token = np.empty((1 + deepest, n), dtype=np.int32)
    logp = np.zeros((1 + deepest, n), dtype=np.float32)
    token[0] = tokens
    depth, forwards = np.zeros(n, dtype=np.int64), []
    active = np.ones(n, dtype=np.bool_)
    path: Float64 = np.zeros(n)
    rows, layer, num_active = roots, 0, n
    while layer < deepest and num_active:
        layer += 1
        forwards.append(num_active)
        own = first_logp[rows]
        token[layer] = first_token[rows]
        path = path + own
        logp[layer] = path
        depth += active
        if stopping is not None:
            stopping.correct(np.exp(path[active]).tolist())
        active &= limit > layer
        if stops_below is not None:
            active &= path >= stops_below
        if token_stops_below is not None:
            path = np.where(own >= token_stops_below, path, -np.inf)
            active &= path > -np.inf
        active &= token[layer] != end_token
        num_active = int(np.count_nonzero(active))
        if stopping is not None and num_active and not stopping.pays(np.exp(path[active]).tolist()):
            break
        if layer < deepest and num_active:
            rows = first_next[rows]
    depths = np.arange(1 + layer, dtype=np.int32)
    parents = depths - 1
    by_request, path_logp = np.ascontiguousarray(token.T), np.ascontiguousarray(logp.T)
    trees = [
        TokenTree(token=t[:size], parent=parents[:size], logp=v[:size], depth=depths[:size])
        for t, v, size in zip(by_request, path_logp, (1 + depth).tolist(), strict=True)
    ]
    return trees, forwards


def _ends(plans: Sequence[DraftPlan]) -> tuple[Int64, Float64 | None, Float64 | None]:
    """Where drafts end, by request.

    Returns:
        the most layers; the log-probability below which a draft's best path ends it; and that below which a
        token is not extended. None where no plan has such a bound.
    """
    # A draft ends where its best path falls below either.
    paths = [max(plan.stop_logp, plan.least_forward_logp) for plan in plans]
    tokens = [plan.stop_token_logp for plan in plans]
    return (
        np.array([plan.depth for plan in plans]),
        np.array(paths) if max(paths) > -np.inf else None,
        np.array(tokens) if max(tokens) > -np.inf else None,
    )
