"""The stages of `flotilla zoo heads`, one after the other: each takes what the one before wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.heads_config import check_target, read_description
from tests.zoo import written_answers
from zoo import heads, heads_data, heads_evaluate
from zoo.scored import Scored


def test_heads_are_trained_on_what_the_target_wrote_and_read(tmp_path: Path) -> None:
    directory = tmp_path / "target"
    target = written_answers.small_target(directory)
    answers = written_answers.write(target, tmp_path)

    scored = Scored.load([tmp_path / "generated-0.npz"])
    heads_data.collect(directory, scored, minutes=0.0).save(tmp_path / "hidden-0.npz")
    rows = heads_data.HiddenRows.load([tmp_path / "hidden-0.npz"])
    assert len(rows) == sum(len(answer) for _, answer in answers)
    assert rows.token.tolist() == [token for _, answer in answers for token in answer]

    trained = heads.train(directory, rows, tmp_path, minutes=0.01)
    check_target(read_description(trained), directory)
    found = heads_evaluate.load(trained, target)
    assert all(bool(weight.any()) for weight in found.parameters()), "they are as they began"
    ids, answer = answers[0]
    ranks = heads_evaluate.follow(target, found, ids, answer)
    assert ranks.shape == (heads.NUM_HEADS, len(answer))
    assert heads_evaluate.accepted_by_layers(heads_evaluate.held_by_tree(ranks, (1, 1, 1)))


def test_after_the_last_token_of_an_answer_a_step_brings_none() -> None:
    """Six tokens, the first of which comes alone: a step of three, with the target's, and one of two."""
    right = np.array([[1, 0, 0, 1, 1, 0], [1, 0, 0, 1, 0, 0]], dtype=np.bool_)
    assert heads_evaluate.accepted_by_layers(right) == [2, 2]
    assert heads_evaluate.tokens_per_step([right]) == pytest.approx(5 / 2)
    assert heads_evaluate.tokens_per_step([np.zeros((2, 1), dtype=np.bool_)]) == 0.0
