"""A model drafter behind retokenization: what it is told, what it drafts, how it is scored."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest

from drafters.messages import DraftPlan
from drafters.model_drafter import ModelDrafter
from drafters.retokenize_vocabulary import Vocabulary
from drafters.retokenized_text import Pair, RetokenizedText, drafted_tokens
from drafters.retokenizing_drafter import RetokenizingDrafter
from engine.hf_runner import HFRunner
from engine.sampling_params import SamplingParams
from tests.drafters.tiny import assert_same_tree, call, following, llama, opening, trees
from tests.drafters.tokenizers_of_all_kinds import byte_level

TARGET_SIZE, OWN_SIZE = 420, 300


MODEL = llama(3, vocab_size=OWN_SIZE)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root: Path = tmp_path_factory.mktemp("pair")
    target, own = byte_level(root / "a", TARGET_SIZE), byte_level(root / "b", OWN_SIZE, digits=True)
    return Pair.of(Vocabulary(target), Vocabulary(own))


def inner(num_slots: int = 1024) -> ModelDrafter:
    return ModelDrafter(HFRunner(copy.deepcopy(MODEL), num_slots), max_depth=32)


def spelled(pair: Pair, text: str) -> list[int]:
    return [0, *(pair.target.spell(text.encode()) or [])]


def test_it_drafts_what_the_model_says_in_the_other_vocabulary(pair: Pair) -> None:
    tokens = spelled(pair, "return the initial values of")
    text = RetokenizedText(pair)
    text.append(tokens)
    drafter = RetokenizingDrafter(inner(), pair, TARGET_SIZE)
    for depth in (1, 3, 5):
        tree = trees(drafter.draft(call(opening("a", tokens, DraftPlan(depth)))))["a"]
        own_depth = int(np.ceil(depth * len(text.ids) / len(tokens))) + 1
        own = trees(inner().draft(call(opening("a", text.ids, DraftPlan(own_depth)))))["a"]
        expected = drafted_tokens(pair, own.token[1:].tolist(), own.logp[1:].tolist())
        assert tree.token[1:].tolist() == expected.tokens[:depth]
        np.testing.assert_allclose(tree.logp[1:], expected.logps[:depth], atol=1e-4)
        assert tree.num_drafted
    assert drafter.capabilities.vocab_size == TARGET_SIZE
    assert drafter.capabilities.kind == "retokenized_model"


def test_wide_trees_keep_to_the_plan(pair: Pair) -> None:
    drafter = RetokenizingDrafter(inner(), pair, TARGET_SIZE)
    tree = trees(drafter.draft(call(opening("a", spelled(pair, "the fox"), DraftPlan(3, 4)))))["a"]
    assert 1 < np.bincount(tree.depth).max() <= 4
    assert tree.depth.max() <= 3
    for node in range(len(tree)):
        children = tree.token[tree.children(node)]
        assert len(set(children.tolist())) == len(children)


def test_a_path_is_no_likelier_than_what_it_goes_on_from(pair: Pair) -> None:
    """A token that ends one path, unsure how it would go on, and is settled within another."""
    turned = Pair.of(pair.drafter, pair.target)
    model = ModelDrafter(HFRunner(llama(3, vocab_size=TARGET_SIZE), 4096), max_depth=32)
    drafter = RetokenizingDrafter(model, turned, OWN_SIZE)
    rng = np.random.default_rng(0)
    for number in range(120):
        item = opening(str(number), [0, *rng.integers(3, 290, 12).tolist()], DraftPlan(5, 4))
        tree = trees(drafter.draft(call(item)))[str(number)]
        assert (tree.logp[1:] <= tree.logp[tree.parent[1:]]).all()


def test_step_by_step_it_drafts_as_from_the_whole(pair: Pair) -> None:
    """Also where a token changes how those before it are spelled: then KV is rolled back."""
    text = "def initialize(self, values): return 12345 naïve ☃ 漢字 values"
    tokens = spelled(pair, text)
    plan = DraftPlan(3, 2)
    drafter = RetokenizingDrafter(inner(), pair, TARGET_SIZE)
    drafter.draft(call(opening("a", tokens[:6], plan)))
    for n in range(7, len(tokens) + 1):
        step = trees(drafter.draft(call(following("a", n - 1, tokens[n - 1 : n], plan), ahead=n % 2 == 0)))[
            "a"
        ]
        drafter.draft_ahead()
        fresh = RetokenizingDrafter(inner(), pair, TARGET_SIZE)
        assert_same_tree(step, trees(fresh.draft(call(opening("a", tokens[:n], plan))))["a"])


def test_tokens_sent_again_replace_what_was_heard(pair: Pair) -> None:
    plan = DraftPlan(3)
    first, second = spelled(pair, "return the values of a fox"), spelled(pair, "return the values and")
    same = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    drafter = RetokenizingDrafter(inner(), pair, TARGET_SIZE)
    drafter.draft(call(opening("a", first, plan)))
    start = same - 1
    result = trees(drafter.draft(call(following("a", start, second[start:], plan))))["a"]
    fresh = RetokenizingDrafter(inner(), pair, TARGET_SIZE)
    assert_same_tree(result, trees(fresh.draft(call(opening("a", second, plan))))["a"])


def test_scores_count_the_targets_tokens(pair: Pair) -> None:
    drafter = RetokenizingDrafter(inner(), pair, TARGET_SIZE)
    tokens = spelled(pair, "return the initial")
    drafter.draft(call(opening("a", tokens, DraftPlan(0))))
    own = trees(drafter.draft(call(following("a", len(tokens), [], DraftPlan(6)))))["a"]
    settled = own.token[1:3].tolist()
    right = drafter.draft(call(following("a", len(tokens), settled, DraftPlan(0)))).drafts[0]
    assert (right.num_scored, right.num_agreed) == (2, 2)
    wrong = spelled(pair, "漢字漢字")[1:]
    missed = drafter.draft(call(following("a", len(tokens) + 2, wrong, DraftPlan(0)))).drafts[0]
    assert missed.num_scored == len(wrong)
    assert missed.num_agreed < len(wrong) / 2
    # The prompt is not scored, an output sent with the opening is.
    whole = tokens + settled
    again = RetokenizingDrafter(inner(), pair, TARGET_SIZE)
    opened = again.draft(call(opening("b", whole, DraftPlan(0), prompt_len=len(tokens)))).drafts[0]
    assert (opened.num_scored, opened.num_agreed) == (2, 2)


def test_sampling_requests_are_drafted_for_greedily(pair: Pair) -> None:
    tokens, plan = spelled(pair, "return the"), DraftPlan(4)
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=50, logit_bias={7: 100.0})
    found = [
        trees(RetokenizingDrafter(inner(), pair, TARGET_SIZE).draft(call(opening("a", tokens, plan, **how))))[
            "a"
        ]
        for how in ({}, {"sampling": sampling})
    ]
    assert_same_tree(*found)


def test_what_the_inner_drafter_lost_is_unknown(pair: Pair) -> None:
    drafter = RetokenizingDrafter(inner(num_slots=40), pair, TARGET_SIZE)
    plan = DraftPlan(1)
    texts = [spelled(pair, "return the values of a fox " + letter * 9) for letter in "abcd"]
    for number, tokens in enumerate(texts):
        drafter.draft(call(opening(str(number), tokens, plan)))
    for _ in range(2):
        assert drafter.draft(call(following("0", len(texts[0]), [], plan))).unknown == ["0"]
    assert not drafter.draft(call(opening("0", texts[0], plan))).unknown
    assert drafter.draft(call(following("0", 1, [5], plan), release=["0"])).unknown == ["0"]


def test_an_output_that_is_no_text_is_followed(pair: Pair) -> None:
    drafter = RetokenizingDrafter(inner(), pair, TARGET_SIZE)
    tokens = [int(t) for t in np.random.default_rng(2).integers(0, TARGET_SIZE, 40)]
    assert "a" in trees(drafter.draft(call(opening("a", tokens, DraftPlan(4)))))
    assert "a" in trees(drafter.draft(call(following("a", 40, [TARGET_SIZE + 5], DraftPlan(4)))))
