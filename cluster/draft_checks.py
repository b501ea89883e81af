"""Whether a drafter's answer can be what it says: nothing that a drafter sends may break the scheduler."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from cluster.drafter_state import OutstandingDraft
from cluster.events import DraftDone
from cluster.requests import Request, State
from drafters.messages import Draft, DraftResult
from engine.tree import TokenTree

_log = logging.getLogger(__name__)


def checked(
    event: DraftDone,
    call: OutstandingDraft,
    requests: Mapping[str, Request],
    vocab_size: int,
    max_model_tokens: int,
) -> DraftResult:
    """The answer without drafts that are not trees, nor of requests it was asked for; the log says of whom.

    A request left out goes on without a draft. What the target would not take (another root than the last
    token, tokens outside the vocabulary, more than the longest sequence has room for) is left out as well.

    Args:
        event: the answer.
        call: what it answers.
        requests: by id; those of them that await this very call have their roots compared.
        vocab_size: token ids run below this.
        max_model_tokens: longest sequence served.
    """
    result, drafts = event.result, event.result.drafts
    asked = set(call.request_ids)
    are_asked = [draft.request_id in asked for draft in drafts]
    if all(are_asked) and _are_trees([draft.tree for draft in drafts], vocab_size):
        sound = [True] * len(drafts)
    else:
        sound = [
            is_asked and _are_trees([draft.tree], vocab_size)
            for draft, is_asked in zip(drafts, are_asked, strict=True)
        ]
    for index, draft in enumerate(drafts):
        request = requests.get(draft.request_id)
        if sound[index] and request is not None and request.draft_call == result.call_id:
            sound[index] = _continues(draft, request, max_model_tokens)
    if all(sound):
        return result
    dropped = [draft.request_id for draft, is_sound in zip(drafts, sound, strict=True) if not is_sound]
    _log.error("drafter %s: drafts that make no sense, of %s", event.drafter, ", ".join(dropped[:8]))
    kept = [draft for draft, is_sound in zip(drafts, sound, strict=True) if is_sound]
    return msgspec.structs.replace(result, drafts=kept)


def _continues(draft: Draft, request: Request, max_model_tokens: int) -> bool:
    """Whether the tree goes on from where the request is, and can be committed to its end."""
    if request.state is not State.DRAFTING:
        return True  # it is not waited for
    tree = draft.tree
    if int(tree.token[0]) != request.last_token:
        return False
    # In a sound tree no node is deeper than its index.
    room = max_model_tokens - 1 - request.num_tokens
    return len(tree.token) <= room or int(tree.depth.max()) <= max(0, room)


def _are_trees(trees: Sequence[TokenTree], vocab_size: int) -> bool:
    """Whether all are trees as `TokenTree` says, of tokens in the vocabulary; at once, for speed."""
    sizes = [len(tree.token) for tree in trees]
    for tree, size in zip(trees, sizes, strict=True):
        if not size or not (len(tree.parent) == len(tree.logp) == len(tree.depth) == size):
            return False
    if not trees or max(sizes) == 1:
        return all(_is_root(tree, vocab_size) for tree in trees)
    counts = np.array(sizes)
    starts = counts.cumsum() - counts
    own_start = starts.repeat(counts)
    token = np.concatenate([tree.token for tree in trees])
    parent = np.concatenate([tree.parent for tree in trees])
    depth = np.concatenate([tree.depth for tree in trees])
    logp = np.concatenate([tree.logp for tree in trees])
    if int(token.min()) < 0 or int(token.max()) >= vocab_size:
        return False
    if (parent[starts] != -1).any() or depth[starts].any():
        return False
    place = parent + own_start
    place[starts] = starts
    if (place < own_start).any():
        return False
    is_before = place < np.arange(len(token))
    is_before[starts] = True
    if not is_before.all():
        return False
    step = depth - depth[place]
    step[starts] = 1
    with np.errstate(invalid="ignore"):  # infinities would make conditional probabilities of nothing
        return bool((step == 1).all()) and not np.isnan(logp - logp[place]).any()


def _is_root(tree: TokenTree, vocab_size: int) -> bool:
    is_alone = int(tree.parent[0]) == -1 and int(tree.depth[0]) == 0
    return is_alone and 0 <= int(tree.token[0]) < vocab_size and bool(np.isfinite(tree.logp[0]))
