"""The replay of known answers counts what verification would accept."""

from __future__ import annotations

import numpy as np

from benchmarks.draft_replay import accepted, replay
from drafters.messages import DraftPlan
from drafters.prompt_lookup import PromptLookupDrafter
from engine.tree import TokenTree


def test_the_path_that_agrees_is_accepted() -> None:
    tree = TokenTree(
        token=np.array([9, 1, 2, 3, 4], np.int32),
        parent=np.array([-1, 0, 0, 2, 3], np.int32),
        logp=np.zeros(5, np.float32),
        depth=np.array([0, 1, 1, 2, 3], np.int32),
    )
    assert accepted(tree, [2, 3, 5]) == 2
    assert accepted(tree, [5]) == 0
    assert accepted(tree, [2, 3]) == 2


def test_steps_are_counted_to_the_end_of_the_answer() -> None:
    drafter = PromptLookupDrafter(vocab_size=20, max_tokens=200)
    totals = replay(drafter, "a", [1, 4, 5, 6, 7, 8, 1, 4], [5, 6, 7, 8, 11, 12], DraftPlan(4))
    # The first step drafts 5 6 7 8 and is given 11; nothing is known of what follows.
    assert (totals["tokens"], totals["steps"], totals["scored"], totals["agreed"]) == (6, 2, 6, 4)
