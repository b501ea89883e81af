"""The shared constructor, and the benchmark of draft calls built on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import draft_cost
from drafters.factory import build_drafter
from drafters.messages import DraftPlan
from tests.drafters.tiny import assert_same_tree, call, drafter, llama, opening, prompt, trees


def test_a_model_directory_becomes_a_drafter(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(str(tmp_path))
    built = build_drafter("model", path=str(tmp_path), num_slots=200, max_depth=4, max_width=2)
    assert built.capabilities.num_slots == 200
    assert built.capabilities.num_parameters == model.num_parameters()
    item = opening("a", prompt(1, 20), DraftPlan(9, 9))
    tree = trees(built.draft(call(item)))["a"]
    assert_same_tree(tree, trees(drafter(model, max_depth=4, max_width=2).draft(call(item)))["a"])
    assert (len(tree), tree.depth.max()) == (9, 4)


def test_missing_and_unknown_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="path"):
        build_drafter("model")
    with pytest.raises(ValueError, match="vocab_size"):
        build_drafter("prompt_lookup")
    with pytest.raises(ValueError, match="oracle"):
        build_drafter("oracle")  # type: ignore[arg-type]


@pytest.mark.parametrize("trees", ["host", "device"])
def test_the_cost_of_draft_calls_is_measured(trees: str, tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    draft_cost.main(f"--requests 2 --width 2 --context 16 --calls 2 --trees {trees} --json {file}".split())
    (cost,) = json.loads(file.read_text())["costs"]
    assert cost["forwards"] == 4
    assert cost["shape"] == {"requests": 2, "depth": 4, "width": 2, "sampled": False}
    assert 0 < cost["forward_ms"] < cost["call_ms"]
    ended = f"--requests 1 --depth 8 --width 1 --context 16 --calls 2 --used 2 --trees {trees} --json {file}"
    draft_cost.main(ended.split())
    assert json.loads(file.read_text())["costs"][0]["forwards"] == 2
