"""Ways in which a drafter's answer may be wrong, for the fault search."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.chaos_workers import VOCAB
from drafters.messages import Draft, DraftResult
from engine.tree import TokenTree


def _of_every_tree(change: Callable[[TokenTree], TokenTree]) -> Callable[[DraftResult], DraftResult]:
    def corrupt(result: DraftResult) -> DraftResult:
        drafts = [
            Draft(request_id=d.request_id, tree=change(d.tree), num_scored=d.num_scored)
            for d in result.drafts
        ]
        return DraftResult(call_id=result.call_id, drafts=drafts, unknown=result.unknown)

    return corrupt


def _with(tree: TokenTree, **fields: object) -> TokenTree:
    arrays = {name: getattr(tree, name) for name in ("token", "parent", "logp", "depth")}
    return TokenTree(**(arrays | fields))


def _chain(root: int, length: int) -> TokenTree:
    return TokenTree.chain(root, [(root + i) % VOCAB for i in range(length)], [-0.1] * length)


def _renamed(result: DraftResult, name: str) -> DraftResult:
    drafts = [Draft(request_id=name, tree=draft.tree, num_scored=3) for draft in result.drafts]
    return DraftResult(call_id=result.call_id, drafts=drafts)


def _repeated(result: DraftResult) -> DraftResult:
    return DraftResult(call_id=result.call_id, drafts=[*result.drafts, *result.drafts])


def _unknown(result: DraftResult) -> DraftResult:
    return DraftResult(
        call_id=result.call_id, drafts=[], unknown=[d.request_id for d in result.drafts] + ["nobody"]
    )


#: Ways in which a drafter's answer may be wrong.
CORRUPTIONS: dict[str, Callable[[DraftResult], DraftResult]] = {
    "wrong tokens": _of_every_tree(
        lambda tree: _with(tree, token=np.append(tree.token[:1], (tree.token[1:] + 11) % VOCAB))
    ),
    "wrong root": _of_every_tree(lambda tree: _with(tree, token=(tree.token + 1) % VOCAB)),
    "outside the vocabulary": _of_every_tree(
        lambda tree: _with(_chain(int(tree.token[0]), 2), token=np.array([tree.token[0], -3, 1 << 20]))
    ),
    "parent after its child": _of_every_tree(
        lambda tree: _with(_chain(int(tree.token[0]), 3), parent=np.array([-1, 2, 1, 9], dtype=np.int32))
    ),
    "two roots": _of_every_tree(
        lambda tree: _with(_chain(int(tree.token[0]), 2), parent=np.array([-1, -1, 0], dtype=np.int32))
    ),
    "wrong depths": _of_every_tree(lambda tree: _with(tree, depth=tree.depth * 2 + 1)),
    "no nodes": _of_every_tree(lambda tree: TokenTree.of([], [], [], [])),
    "lengths differ": _of_every_tree(
        lambda tree: _with(_chain(int(tree.token[0]), 3), logp=np.zeros(2, dtype=np.float32))
    ),
    "no numbers": _of_every_tree(lambda tree: _with(tree, logp=np.full(len(tree), np.nan, np.float32))),
    "above one": _of_every_tree(lambda tree: _with(tree, logp=tree.depth.astype(np.float32) * 90.0)),
    "far too deep": _of_every_tree(lambda tree: _chain(int(tree.token[0]), 150)),
    "far too wide": _of_every_tree(
        lambda tree: TokenTree.of(
            [int(tree.token[0]), *[3] * 400], [-1, *[0] * 400], [0.0, *[-0.5] * 400], [0, *[1] * 400]
        )
    ),
    "of nobody": lambda result: _renamed(result, "nobody"),
    "of another request": lambda result: _renamed(result, "r0"),
    "twice": _repeated,
    "unknown": _unknown,
    "of another call": lambda result: DraftResult(call_id=result.call_id + 1000, drafts=result.drafts),
    "nothing": lambda result: DraftResult(call_id=result.call_id, drafts=[]),
}
