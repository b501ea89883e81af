"""Whether a drafter's answer can be what it says: nothing that a drafter sends may break the scheduler."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import isfinite, isnan

import msgspec
import numpy as np

from cluster.drafter_state import OutstandingDraft
from cluster.events import DraftDone
from cluster.requests import Request, State
from drafters.messages import Draft, DraftResult
from engine.tree import TokenTree
from engine.tree_batch import FEW_NODES, TreeBatch

_log = logging.getLogger(__name__)


def checked(
    event: DraftDone,
    call: OutstandingDraft,
    requests: Mapping[str, Request],
    vocab_size: int,
    max_model_tokens: int,
) -> tuple[DraftResult, TreeBatch]:
    """The answer without drafts that are not trees, nor of requests it was asked for; the log says of whom.

    A request left out goes on without a draft. What the target would not take (another root than the last
    token, tokens outside the vocabulary, more than the longest sequence has room for) is left out as well.

    Args:
        event: the answer.
        call: what it answers.
        requests: by id; those of them that await this very call have their roots compared.
        vocab_size: token ids run below this.
        max_model_tokens: longest sequence served.

    Returns:
        the answer, and the trees of its drafts.
    """
    result, drafts = event.result, event.result.drafts
    trees = TreeBatch([draft.tree for draft in drafts])
    asked, answered = call.request_ids, tuple([draft.request_id for draft in drafts])
    are_asked = answered == asked or set(asked).issuperset(answered)
    if are_asked and _are_trees(trees, vocab_size):
        misfits = _misfits(drafts, trees, result.call_id, requests, max_model_tokens)
        if not misfits:
            return result, trees
        sound = [index not in misfits for index in range(len(drafts))]
    else:
        sound = [
            draft.request_id in asked
            and _are_trees(tree := TreeBatch([draft.tree]), vocab_size)
            and not _misfits([draft], tree, result.call_id, requests, max_model_tokens)
            for draft in drafts
        ]
    dropped = [draft.request_id for draft, is_sound in zip(drafts, sound, strict=True) if not is_sound]
    _log.error("drafter %s: drafts that make no sense, of %s", event.drafter, ", ".join(dropped[:8]))
    kept = [draft for draft, is_sound in zip(drafts, sound, strict=True) if is_sound]
    return msgspec.structs.replace(result, drafts=kept), TreeBatch([draft.tree for draft in kept])


def take_drafts(result: DraftResult, requests: Mapping[str, Request]) -> list[Request]:
    """Requests get their candidate trees; those of them that still waited for this call."""
    drafted, call_id = [], result.call_id
    for draft in result.drafts:
        request = requests.get(draft.request_id)
        if request is not None and request.awaits(call_id):
            tree = draft.tree
            request.num_drafted += len(tree.token) - 1
            request.drafted(tree)
            drafted.append(request)
    return drafted


def awaiting(call: OutstandingDraft, requests: Mapping[str, Request]) -> list[Request]:
    """Requests that still wait for this very call."""
    asked = [requests.get(request_id) for request_id in call.request_ids]
    return [request for request in asked if request is not None and request.awaits(call.call_id)]


def _misfits(
    drafts: Sequence[Draft],
    trees: TreeBatch,
    call_id: int,
    requests: Mapping[str, Request],
    max_model_tokens: int,
) -> set[int]:
    """Which trees do not go on from where their requests are, or cannot be committed to their ends."""
    if not drafts:
        return set()
    found = set()
    drafting, get = State.DRAFTING, requests.get
    if trees.num_nodes <= FEW_NODES:
        roots = [int(tree.token[0]) for tree in trees]
    else:
        roots = trees.token[trees.offsets[:-1]].tolist()
    for index, (draft, root) in enumerate(zip(drafts, roots, strict=True)):
        request = get(draft.request_id)
        if request is None or request.draft_call != call_id or request.state is not drafting:
            continue  # it is not waited for
        tree = draft.tree
        # In a sound tree no node is deeper than its index.
        room = max_model_tokens - 1 - request.num_tokens
        if root != request.last_token or (len(tree.token) > room and int(tree.depth.max()) > max(0, room)):
            found.add(index)
    return found


def _are_trees(batch: TreeBatch, vocab_size: int) -> bool:
    """Whether all are trees as `TokenTree` says, of tokens in the vocabulary; at once, for speed."""
    for tree in batch:
        size = len(tree.token)
        if not size or not (len(tree.parent) == len(tree.logp) == len(tree.depth) == size):
            return False
    num_nodes = batch.num_nodes
    if num_nodes <= FEW_NODES or num_nodes == len(batch):
        return all(_is_tree(tree, vocab_size) for tree in batch)
    token, parent, depth, roots = batch.token, batch.parent, batch.depth, batch.offsets[:-1]
    # Counted rather than asked for all or any, which takes three times as long for so few.
    count = np.count_nonzero
    if count(token < 0) or count(token >= vocab_size):
        return False
    # Of all nodes only roots have no parent, and no parent comes after its child.
    if count(parent[roots] == -1) != len(batch) or count(parent < 0) != len(batch):
        return False
    if count(batch.above < np.arange(len(token))) != len(token) - len(batch):
        return False
    expected = depth[batch.above] + 1
    expected[roots] = 0
    if count(depth != expected):
        return False
    # Infinities would make conditional probabilities of nothing.
    return not count(np.isnan(batch.step_logp))


def _is_tree(tree: TokenTree, vocab_size: int) -> bool:
    parent, depth, logp = tree.parent.tolist(), tree.depth.tolist(), tree.logp.tolist()
    if parent[0] != -1 or depth[0] != 0 or not isfinite(logp[0]):
        return False
    for token in tree.token.tolist():
        if not 0 <= token < vocab_size:
            return False
    for node in range(1, len(parent)):
        above = parent[node]
        if not 0 <= above < node or depth[node] != depth[above] + 1 or isnan(logp[node] - logp[above]):
            return False
    return True
