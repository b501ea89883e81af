"""The model card shows the figures that were measured last."""

from __future__ import annotations

import json

import pytest

from zoo import card
from zoo.cli import EVALUATION, REPLAY
from zoo.registry import DOMAINS

README = EVALUATION.parents[1] / "README.md"


def test_the_card_is_that_of_the_figures_in_the_repository() -> None:
    """`flotilla zoo card` writes it."""
    evaluation, replay = (json.loads(path.read_text(encoding="utf-8")) for path in (EVALUATION, REPLAY))
    text = README.read_text(encoding="utf-8")
    assert card.fill(text, evaluation, replay) == text


def test_a_drafter_has_one_row_and_without_a_replay_there_are_none() -> None:
    figures = {domain: {"acceptance": 0.5, "tokens_per_step": 2.0} for domain in DOMAINS}
    replay = {"depth": 4, "prompts": 3, "drafters": {"known": figures, "new": figures}}
    table = card.replay_table(replay, ["known"])
    assert "| new | 0.500, 2.00 | 0.500, 2.00 | 0.500, 2.00 |" in table
    assert "known" not in table
    evaluation = json.loads(EVALUATION.read_text(encoding="utf-8"))
    assert "By retokenization" not in card.fill(f"{card.BEGIN}\n{card.END}", evaluation)
    with pytest.raises(ValueError, match="the card has no part between"):
        card.fill("a text without marks", evaluation)
