"""What rounding costs is measured on the target's answers, and on nothing that comes after them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks import drafter_rounding
from cluster.local import Completion, LocalEngine
from cluster.model_paths import model_directory
from cluster.stream_messages import Submit
from deployments.demo import demo_config
from zoo.tokenizer import load as load_tokenizer


def test_no_step_is_counted_after_the_end_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    end = load_tokenizer(model_directory(demo_config().target.path)).eos_token_id
    answers: list[list[int]] = []

    class Watched(LocalEngine):
        def generate(self, requests: Sequence[Submit]) -> dict[str, Completion]:
            done = super().generate(requests)
            answers.extend(one.tokens for one in done.values())
            return done

    monkeypatch.setattr(drafter_rounding, "LocalEngine", Watched)
    monkeypatch.setattr(drafter_rounding, "KINDS", ("float",))
    drafter_rounding.measure("summary-1x128", "summary", prompts=3, tokens=48, rounds=1)
    assert len(answers) == 3
    assert all(answer.index(end) == len(answer) - 1 < 47 for answer in answers)
