"""Outputs of benchmarks that differ: counted, judged by the target's scores, an error if no near tie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import typer

from benchmarks.cli_common import end_with_differences
from benchmarks.engine_under_test import Task
from benchmarks.greedy_differences import GreedyDifferences, print_differences
from benchmarks.tables import console
from benchmarks.transformers_engine import Reference

END = (9,)
TASKS = [Task("code", [0], 4), Task("chat", [1], 4)]
# After a token comes the next; after 3 comes 4, or 5 with nearly the same score.
SCORES = torch.eye(10).roll(1, dims=1) * 10.0
SCORES[3, 5] = SCORES[3, 4] - 1e-5
RIGHT = [[1, 2, 3, 4], [2, 3, 4, 5]]


class Target:
    """A model whose logits after a token are a row of `SCORES`."""

    device, dtype = torch.device("cpu"), "float32"

    def model(self, input_ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=SCORES[input_ids])

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def judged(found: list[list[int]]) -> tuple[list[dict[str, Any]], str]:
    differences = GreedyDifferences(END)
    differences.compare("ours", TASKS, RIGHT, RIGHT)
    differences.compare("other", TASKS, RIGHT, found)
    assert differences.num_outputs == {"ours": 2, "other": 2}
    result = differences.judge(lambda: cast(Reference, Target()))
    assert differences.num_different == {"ours": 0, "other": len(result)}
    with console.capture() as shown:
        print_differences(result, 4, "those without speculation")
    return result, " ".join(shown.get().split())


def test_equal_outputs_need_no_model() -> None:
    differences = GreedyDifferences(END)
    # Some engines keep the end token back.
    differences.compare("ours", TASKS, [[1, 9], [2, 3, 4, 5]], [[1], [2, 3, 4, 5]])

    def load() -> Reference:
        raise AssertionError("the target was loaded for nothing")

    assert differences.judge(load) == []
    end_with_differences({"differences": []})


def test_a_near_tie_is_told_and_no_error() -> None:
    found, told = judged([[1, 2, 3, 5], RIGHT[1]])
    assert [(one["engine"], one["domain"], one["position"], one["proven"]) for one in found] == [
        ("other", "code", 3, True)
    ]
    assert (
        told == "1 of 4 outputs differ from those without speculation (other), 0 of them not at a near tie."
    )
    end_with_differences({"differences": found})


@pytest.mark.parametrize("wrong", [[[1, 2, 4, 5], RIGHT[1]], [RIGHT[0], [2, 3, 4]], [RIGHT[0]]])
def test_a_wrong_missing_or_short_output_ends_with_an_error(wrong: list[list[int]]) -> None:
    found, told = judged(wrong)
    assert [one["proven"] for one in found] == [False]
    assert "1 of them not at a near tie" in told
    with pytest.raises(typer.Exit) as ended:
        end_with_differences({"differences": found})
    assert ended.value.exit_code == 1
