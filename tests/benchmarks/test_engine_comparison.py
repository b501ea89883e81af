"""The interleaved comparison, with engines whose speed and outputs are known."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.engine import ALL, Deck, compare, to_json
from benchmarks.engine_under_test import RunResult, Task, same_text, until_end
from benchmarks.prompts import Prompt
from benchmarks.transformers_engine import GenerateBatchEngine

END = (2,)


class FakeEngine:
    """Takes a known time per token, and answers every prompt with its own tokens reversed."""

    def __init__(self, name: str, per_token: float, max_concurrency: int | None = None) -> None:
        self.name, self.max_concurrency = name, max_concurrency
        self.calls: list[tuple[str, int]] = []
        self.seen: list[list[int]] = []
        self._per_token = per_token
        self.slow_call = 0
        self.wrong = False
        self.turns: list[str] = []

    def run(self, tasks: Sequence[Task], concurrency: int) -> RunResult:
        self.calls.append((tasks[0].domain, concurrency))
        self.seen += [task.tokens for task in tasks]
        self.turns.append(self.name)
        outputs = [[*reversed(task.tokens), *((9,) if self.wrong else ())] for task in tasks]
        per_token = self._per_token * (4 if len(self.calls) == self.slow_call else 1)
        return RunResult(
            per_token * sum(map(len, outputs)),
            outputs,
            step_s=1.0,
            scheduler_s=0.02 if self.name == "a" else 0,
        )

    def close(self) -> None:
        pass


def deck() -> Deck:
    prompts = [Prompt(domain, text="x", max_tokens=5) for domain in ("code", "chat") for _ in range(30)]
    return Deck(prompts, [[n, n + 1] for n in range(60)], bound=3, seed=0)


def test_medians_ratios_and_bounds() -> None:
    fast, slow, single = FakeEngine("a", 0.1), FakeEngine("b", 0.2), FakeEngine("c", 0.1, 1)
    # The first two are warm-up; one disturbed round does not move a median.
    slow.slow_call = 3
    comparison = compare(
        [fast, slow, single],
        deck(),
        concurrencies=[1, 4],
        per_domain=2,
        rounds=3,
        end_tokens=END,
        reference="b",
    )
    assert comparison.rate("a", "code", 1) == pytest.approx(10.0)
    assert comparison.rate("b", "chat", 1) == pytest.approx(5.0)
    assert comparison.rate("b", ALL, 4) == pytest.approx(5.0)
    assert comparison.ratio("a", "b", ALL, 4) == pytest.approx(2.0)
    assert comparison.rate("c", ALL, 4) is None
    assert len(comparison.cells["a", "chat", 4].seconds) == 3
    # The reference's own outputs are compared with nobody's.
    assert comparison.differences.num_outputs == {"a": 36, "c": 12}
    assert set(comparison.differences.num_different.values()) == {0}
    share = comparison.cells["a", ALL, 1].scheduler_share
    assert share == pytest.approx(0.02)
    record = to_json(comparison, "a", ["b"])
    json.dumps(record, allow_nan=False)


def test_what_is_measured_so_far_is_told_after_each_round_but_the_last() -> None:
    told: list[int] = []
    comparison = compare(
        [FakeEngine("a", 0.1)],
        deck(),
        concurrencies=[1],
        per_domain=2,
        rounds=3,
        end_tokens=END,
        reference="a",
        after_round=lambda found: told.append(len(found.cells["a", ALL, 1].seconds)),
    )
    assert told == [1, 2]
    assert len(comparison.cells["a", ALL, 1].seconds) == 3


def test_every_engine_gets_the_same_prompts_and_none_twice() -> None:
    first, second = FakeEngine("a", 0.1), FakeEngine("b", 0.1)
    dealt = deck()
    compare([first, second], dealt, concurrencies=[1], per_domain=4, rounds=3, end_tokens=END, reference="a")
    assert first.seen == second.seen
    assert len({tuple(tokens) for tokens in first.seen}) == len(first.seen)
    assert not dealt.repeats
    dealt.deal("code", 40)
    assert dealt.repeats


def test_no_engine_always_runs_after_the_same_one() -> None:
    engines, turns = [FakeEngine(name, 0.1) for name in "abcd"], list[str]()

    for engine in engines:
        engine.turns = turns
    compare(engines, deck(), concurrencies=[1], per_domain=2, rounds=3, end_tokens=END, reference="a")
    measured = turns[len(engines) :]
    assert all(sorted(measured[at : at + 4]) == list("abcd") for at in range(0, len(measured), 4))
    before: dict[str, set[str]] = {}
    for one, following in itertools.pairwise(measured):
        before.setdefault(following, set()).add(one)
    assert all(len(names) > 1 for names in before.values()), before


def test_differing_outputs_are_counted() -> None:
    right, wrong = FakeEngine("a", 0.1), FakeEngine("b", 0.1)
    wrong.wrong = True
    comparison = compare(
        [right, wrong], deck(), concurrencies=[2], per_domain=2, rounds=1, end_tokens=END, reference="a"
    )
    assert comparison.differences.num_different == {"b": 4}


def test_outputs_are_cut_and_compared_at_the_end_token() -> None:
    assert until_end([5, 2, 7], 8, END) == [5, 2]
    assert until_end([5, 6, 7], 2, END) == [5, 6]
    assert same_text([5, 2], [5], END)
    assert not same_text([5, 2], [5, 6], END)
    assert same_text([], [], END)


def test_transformers_that_give_nothing_end_the_comparison_with_a_reason() -> None:
    class Silent:
        def add_request(self, tokens: list[int], **options: object) -> None:
            pass

        def get_result(self, timeout: float) -> None:
            return None

    engine = GenerateBatchEngine.__new__(GenerateBatchEngine)
    engine._manager, engine._threads, engine._runs = Silent(), torch.get_num_threads(), 0
    reference: Any = SimpleNamespace(end_tokens=END)
    engine._reference = reference
    with pytest.raises(
        RuntimeError, match="HF generate_batch gave no token for 60 s: leave Transformers out"
    ):
        engine.run([Task("code", [1, 2], 4)], 1)
