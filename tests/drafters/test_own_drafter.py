"""A drafter of a user's own: what it proposes is drafted, and what it gets wrong costs drafts alone."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest

from drafters.messages import DraftItem, DraftPlan
from drafters.own_drafter import READ_TOKENS, OwnDrafter, OwnDrafterSettings
from engine.own_classes import OwnClassError
from engine.tree import TokenTree
from tests.drafters.tiny import call, following, opening, trees

DRAFTERS = """
import numpy as np
from engine.tree import TokenTree

class Counts:
    \"\"\"Says that the next tokens count up, and after `odd` of its options something else.\"\"\"
    def __init__(self, settings):
        self.settings, self.forgotten = settings, []
    def propose(self, request_id, tokens, depth, width):
        odd, first = self.settings.options.get("odd"), tokens[-1] + 1
        return [9 if token == odd else token for token in range(first, first + depth + 3)]
    def forget(self, request_id):
        self.forgotten.append(request_id)

class Branches:
    def __init__(self, settings): pass
    def propose(self, request_id, tokens, depth, width):
        token, parent = [tokens[-1], 1, 2, 3, 4, 5], [-1, 0, 0, 0, 1, 4]
        return TokenTree.of(token, parent, [0, -0.1, -0.5, -2, -0.3, -4], [0, 1, 1, 1, 2, 3])

class Answers:
    def __init__(self, settings):
        self.answer = eval(settings.options["answer"])
    def propose(self, request_id, tokens, depth, width):
        if self.answer == "raise":
            raise KeyError("nothing")
        if self.answer == "change":
            tokens[0:2].clear()
            tokens.clear()
        return self.answer

class NeedsMore:
    def __init__(self, settings, more): pass
    def propose(self, request_id, tokens, depth, width): return []

class Nothing:
    def __init__(self, settings): pass

not_callable = 5
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_drafters.py").write_text(DRAFTERS)
    monkeypatch.syspath_prepend(str(tmp_path))


def made(name: str, **options: object) -> OwnDrafter:
    settings = OwnDrafterSettings(vocab_size=20, max_tokens=100, max_depth=8, max_width=4, options=options)
    return OwnDrafter(f"users_drafters.{name}", settings)


def tree_of(drafter: OwnDrafter, item: DraftItem) -> TokenTree:
    (tree,) = trees(drafter.draft(call(item))).values()
    return tree


PLAN = DraftPlan(depth=3, width=2)


def test_a_chain_is_drafted_as_far_as_the_plan() -> None:
    drafter = made("Counts")
    tree = tree_of(drafter, opening("a", [1, 2, 3], PLAN))
    assert tree.token.tolist() == [3, 4, 5, 6]
    assert tree.parent.tolist() == [-1, 0, 1, 2]
    assert np.allclose(np.diff(tree.logp), np.log(1 / 2), atol=1e-6)
    tree = tree_of(drafter, following("a", 3, [4], DraftPlan(depth=0)))
    assert tree.token.tolist() == [4]


def test_a_tree_is_drafted_within_the_plan() -> None:
    drafter = made("Branches")
    tree = tree_of(drafter, opening("a", [7], DraftPlan(depth=2, width=2)))
    assert (tree.token.tolist(), tree.parent.tolist()) == ([7, 1, 2, 4], [-1, 0, 0, 1])
    plan = DraftPlan(depth=3, width=3, stop_logp=-1.0)
    tree = tree_of(drafter, following("a", 1, [8], plan))
    assert tree.token.tolist() == [8, 1, 2, 4]


def test_what_has_no_probability_is_left_out() -> None:
    answer = "TokenTree.of([3, 1, 2, 4], [-1, 0, 1, 0], [0, -np.inf, -np.inf, -1], [0, 1, 2, 1])"
    tree = tree_of(made("Answers", answer=answer), opening("a", [1, 2, 3], PLAN))
    assert (tree.token.tolist(), tree.logp.tolist()) == ([3, 4], [0, -1])


def test_what_came_is_held_against_what_was_proposed() -> None:
    drafter = made("Counts", odd=6)
    drafter.draft(call(opening("a", [1, 2, 3], PLAN)))  # 4, 5, 9
    (draft,) = drafter.draft(call(following("a", 3, [4, 5, 6, 7], PLAN))).drafts
    assert (draft.num_scored, draft.num_agreed) == (3, 2)
    (draft,) = drafter.draft(call(following("a", 7, [8], PLAN))).drafts
    assert (draft.num_scored, draft.num_agreed) == (1, 1)
    assert draft.tree.logp[1] == pytest.approx(np.log(4 / 6))
    drafter.draft(call(following("a", 8, [9], DraftPlan(depth=0))))
    (draft,) = drafter.draft(call(following("a", 9, [1], PLAN))).drafts
    assert (draft.num_scored, draft.num_agreed) == (0, 0)  # nothing was asked


def test_a_request_that_it_does_not_serve_is_scored_by_its_last_tokens() -> None:
    """Read for a selector: unscored, it would count as one that cannot follow, and never be chosen."""
    drafter = made("Counts", odd=6)
    read, prompt = DraftPlan(depth=0), [9, 9]
    item = opening("a", [*prompt, 3, 4, 5, 6, 7], read, prompt_len=2)
    (draft,) = drafter.draft(call(item)).drafts
    # 3 was not said after 9, nor 6; all that follows what came true was.
    assert (draft.num_scored, draft.num_agreed, len(draft.tree)) == (5, 3, 1)
    (draft,) = drafter.draft(call(opening("b", prompt, read))).drafts
    assert (draft.num_scored, draft.num_agreed) == (0, 0)  # there is no output yet
    (draft,) = drafter.draft(call(opening("c", list(range(1, 20)), read, prompt_len=1))).drafts
    assert draft.num_scored == READ_TOKENS


def test_what_it_reads_on_of_such_a_request_is_scored_once() -> None:
    drafter = made("Counts", odd=6)
    read = DraftPlan(depth=0)
    drafter.draft(call(opening("a", [9, 3, 4, 5], read, prompt_len=1)))
    (draft,) = drafter.draft(call(following("a", 4, [6, 7, 8], read))).drafts
    assert (draft.num_scored, draft.num_agreed) == (3, 2)  # 6 was not said
    (draft,) = drafter.draft(call(following("a", 7, [], read))).drafts
    assert (draft.num_scored, draft.num_agreed) == (0, 0)
    drafter.draft(call(following("a", 7, [], PLAN)))  # 9, 10, 11
    (draft,) = drafter.draft(call(following("a", 7, [9, 2, 3], read))).drafts
    assert (draft.num_scored, draft.num_agreed) == (3, 2)  # all by what was proposed, and 3 by what would be


def test_requests_that_end_are_forgotten() -> None:
    drafter = made("Counts")
    drafter.draft(call(opening("a", [1], PLAN), opening("b", [2], PLAN)))
    drafter.draft(call(following("b", 1, [3], PLAN), release=["a", "c"]))
    assert vars(drafter._proposer)["forgotten"] == ["a"]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("'raise'", "failed in `propose` at .*users_drafters.py:2[0-9]: KeyError: 'nothing'"),
        ("'change'", "failed in `propose` at .*users_drafters.py:2[0-9]: AttributeError"),
        ("None", "failed in `propose`: TypeError"),
        ("5", "failed in `propose`: TypeError"),
        ("['x']", "answered 'x', where it is to answer token ids or a tree"),
        ("[True]", "answered True"),
        ("[1.0]", "answered 1.0"),
        ("[4, 20]", "answered the token 20, where ids are from 0 to 19"),
        ("[-1]", "answered the token -1"),
        ("[2 ** 40]", "OverflowError"),
        ("TokenTree.root_only(4)", "a tree whose root is 4, where the last token is 3"),
        ("TokenTree.of([3, 1], [-1, 1], [0, -1], [0, 1])", "what is no token tree: every node but the root"),
        ("TokenTree.of([3, 1], [-1, 0], [0, float('nan')], [0, 1])", "that rise along a path, or are none"),
        ("TokenTree.of([3, 1, 2], [-1, 0, 1], [0, -1, -0.5], [0, 1, 2])", "that rise along a path"),
        ("TokenTree.of([3, 1], [-1, 0], [0, 0.5], [0, 1])", "that rise along a path"),
        ("TokenTree.of([3, 1], [-1, 0], [float('inf'), -1], [0, 1])", "inf as log-probability of the root"),
        ("TokenTree.of([3], [-1], [float('nan')], [0])", "nan as log-probability of the root"),
        ("TokenTree([3, 1], [-1, 0], [0, -1], [0, 1])", "not all arrays of integers"),
        ("TokenTree(*map(np.array, ([3, 1.5], [-1, 0], [0, -1], [0, 1])))", "not all arrays of integers"),
        ("TokenTree(*map(np.array, ([3, 1], [-1, 0], [0, -1j], [0, 1])))", "logp one of real numbers"),
    ],
)
def test_where_it_fails_nothing_is_drafted(answer: str, told: str, caplog: pytest.LogCaptureFixture) -> None:
    drafter = made("Answers", answer=answer)
    with caplog.at_level(logging.ERROR):
        tree = tree_of(drafter, opening("a", [1, 2, 3], PLAN))
    assert tree.token.tolist() == [3]
    assert re.search(f"the drafter `users_drafters.Answers`:? .*{told}", caplog.text)
    assert "its requests go on without drafts" in caplog.text
    caplog.clear()
    tree = tree_of(drafter, following("a", 3, [3], PLAN))  # it goes on
    assert tree.token.tolist() == [3]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("NoSuch", "cannot be imported"),
        ("not_callable", "is no class"),
        ("Nothing", "has no method `propose`"),
        ("NeedsMore", "failed in its constructor.*TypeError"),
    ],
)
def test_what_cannot_be_made_is_said(name: str, told: str) -> None:
    with pytest.raises(OwnClassError, match=f"the drafter `users_drafters.{name}` ?.*{told}"):
        made(name)
