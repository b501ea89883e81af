"""`flotilla bench pool`: who takes part, who was best on a prompt, and the ratios."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import demo
from benchmarks.compare import cell_config
from benchmarks.engine_under_test import Task
from benchmarks.greedy_differences import GreedyDifferences
from benchmarks.pool import PoolComparison, Rounds, best_alone, fastest_alone, ratios
from benchmarks.pool_cell import Served
from benchmarks.pool_contenders import ORACLE, PLAIN, contenders
from cluster.drafter_config import SuffixAutomatonConfig
from cluster.stream_messages import Receipt

TASK = Task("code", [1, 2, 3], 8)


def served(seconds: float, num_tokens: int = 8, drafter: str = "small") -> Served:
    receipt = Receipt(
        queue_ms=0.0,
        ttft_ms=1.0,
        tpot_ms=1.0,
        e2e_ms=seconds * 1e3,
        num_prompt_tokens=3,
        num_cached_tokens=0,
        num_output_tokens=num_tokens,
        num_steps=4,
        num_drafted=10,
        num_verified=8,
        num_accepted=4,
        drafters={drafter: 4},
        num_preemptions=0,
    )
    return Served(list(range(num_tokens)), receipt, seconds)


def rounds(label: str, *seconds: float) -> Rounds:
    made = Rounds(label)
    for each in seconds:
        made.add([TASK], [served(each)], each, switches=0.0)
    return made


def test_everybody_takes_part_and_the_oracle_is_last() -> None:
    labels = [one.label for one in contenders(["small", "large"], ["lbss", "flotilla"])]
    assert labels == [PLAIN, "alone: small", "alone: large", "pool: lbss", "pool: flotilla", ORACLE]
    with pytest.raises(ValueError, match="at least one drafter and one selector"):
        contenders([], ["lbss"])


def test_who_is_named_twice_takes_part_once() -> None:
    """Its rounds would be twice those of the others, and nobody could be compared in the end."""
    assert contenders(["a", "a"], ["x", "y", "x"]) == contenders(["a"], ["x", "y"])


def test_contenders_find_nothing_of_what_the_one_before_was_answered() -> None:
    """Each is asked the same prompts: a suffix automaton would draft the answers that it saw before."""
    config = demo.keeping_nothing(demo.every_kind())
    assert not config.target.prefix_sharing
    scopes = [drafter.scope for drafter in config.drafters if isinstance(drafter, SuffixAutomatonConfig)]
    assert scopes == ["request"]
    assert not any(drafter.prefix_sharing for drafter in config.drafters if drafter.kind == "model")


def test_a_comparison_of_policies_finds_nothing_of_the_one_before_either(tmp_path: Path) -> None:
    file = tmp_path / "cell.yaml"
    file.write_text(demo.every_kind().model_dump_json())
    config = cell_config(file)
    scopes = [drafter.scope for drafter in config.drafters if isinstance(drafter, SuffixAutomatonConfig)]
    assert (config.target.prefix_sharing, scopes) == (False, ["request"])


def test_the_fastest_alone_is_found_per_prompt_by_time_per_token() -> None:
    alone = {
        "small": [served(2.0), served(1.0)],
        "large": [served(1.0), served(3.0, num_tokens=32)],
        "": [served(4.0), served(4.0)],
    }
    assert [fastest_alone(number, alone) for number in range(2)] == ["large", "large"]


def test_ratios_are_of_rounds_with_the_same_prompts() -> None:
    comparison = PoolComparison(
        {
            one.label: one
            for one in (
                rounds(PLAIN, 4.0, 8.0, 2.0),
                rounds("alone: small", 2.0, 4.0, 1.0),
                rounds("alone: large", 3.0, 5.0, 2.0),
                rounds("pool: flotilla", 1.0, 4.0, 0.5),
                rounds(ORACLE, 1.0, 2.0, 0.5),
            )
        },
        GreedyDifferences(()),
    )
    assert best_alone(comparison).label == "alone: small"
    found = ratios(comparison)
    assert found["pool: flotilla"]["best single"] == pytest.approx(2.0)
    assert found["pool: flotilla"][PLAIN] == pytest.approx(4.0)
    assert found["alone: small"][ORACLE] == pytest.approx(0.5)
    assert comparison.rounds["alone: small"].tokens_per_step == pytest.approx(2.0)
    assert comparison.rounds["alone: small"].chosen["code"] == {"small": 12}
