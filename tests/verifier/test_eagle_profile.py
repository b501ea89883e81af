"""What EAGLE's layer is measured to cost: in shapes that fit, of reads like those of service."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks import eagle_cost
from cluster.linear_cost import StepPoint
from cluster.profile_fit import NUM_COEFFICIENTS, fit_cost
from engine.devices import Stopwatch
from engine.eagle_loading import EagleFiles
from engine.llama_runner import LlamaRunner
from engine.runner import Segment
from tests.eagle_reference import EagleReference
from tests.verifier.target import MAX_TOKENS, Target
from verifier.eagle_drafts import EagleDrafts
from verifier.eagle_profile import KEPT_ROWS, measure_eagle_costs, read_after
from verifier.profile import measure_step_costs
from verifier.proposing import Read

TARGET = Target()


def made(tmp_path: Path, num_slots: int) -> tuple[LlamaRunner, EagleDrafts]:
    TARGET.plain.config.save_pretrained(tmp_path / "target")
    files = EagleFiles.of(EagleReference(TARGET.plain).write(tmp_path / "eagle"), tmp_path / "target")
    runner = TARGET.runner(num_slots)
    assert isinstance(runner, LlamaRunner)
    runner.keep_features(files.layers)
    layer, reading = files.load(runner, 64)
    return runner, EagleDrafts(layer, reading, MAX_TOKENS)


@pytest.fixture
def beside(tmp_path: Path) -> tuple[LlamaRunner, EagleDrafts]:
    return made(tmp_path, 300)


def test_drafts_are_measured_in_the_shapes_that_fit(beside: tuple[LlamaRunner, EagleDrafts]) -> None:
    runner, drafts = beside
    points = measure_eagle_costs(runner, drafts, (1, 4), (1, 3), (20, 200), repeats=2)
    # Nobody has 200 tokens: a request has 96 at most, and 4 share 300 slots with the root of each.
    assert [point[:3] for point in points] == [
        (1, 1, 20),
        (1, 1, 91),
        (1, 3, 20),
        (1, 3, 91),
        (4, 4, 80),
        (4, 4, 296),
        (4, 12, 80),
        (4, 12, 296),
    ]
    assert all(seconds > 0 for *_, seconds in points)


@pytest.mark.parametrize("num_slots", [64, 128])
def test_the_smallest_pools_show_enough_for_a_cost(tmp_path: Path, num_slots: int) -> None:
    points = measure_eagle_costs(*made(tmp_path, num_slots), repeats=1)
    assert len(points) >= NUM_COEFFICIENTS
    fit_cost([StepPoint(*point) for point in points])


class Noted(EagleDrafts):
    """Notes what it reads."""

    noted: Sequence[Read] = ()

    def read(self, reads: Sequence[Read], *, is_asked: bool) -> Stopwatch:
        self.noted = reads
        return super().read(reads, is_asked=is_asked)


def test_of_a_prompt_all_rows_are_read_and_of_a_tree_a_few(beside: tuple[LlamaRunner, EagleDrafts]) -> None:
    runner, drafts = beside
    noted = Noted(drafts._layer, runner, MAX_TOKENS)
    seen = []
    for rows, visible in ((20, None), (8, np.tri(8, dtype=np.bool_)), (1, None)):
        numbers = np.arange(rows, dtype=np.int32)
        segment = Segment(numbers, numbers, numbers, numbers[:0], visible)
        runner.forward([segment, segment], np.arange(2 * rows, dtype=np.int32))
        read_after(noted, [segment, segment])
        seen.append([(len(one.rows), int(one.rows[0])) for one in noted.noted])
    assert seen == [[(20, 0), (20, 20)], [(KEPT_ROWS, 0), (KEPT_ROWS, 8)], [(1, 0), (1, 1)]]
    followed: list[Sequence[Segment]] = []
    measure_step_costs(runner, (8,), (0,), 2, then=followed.append)
    assert [[len(one.tokens) for one in segments] for segments in followed] == [[8]] * 3


def test_the_cost_of_a_layer_is_measured_without_a_target(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    eagle_cost.main(
        f"--requests 2 --width 1 3 --depth 3 --context 16 --calls 2 --dtype bfloat16 --json {file}".split()
    )
    costs = json.loads(file.read_text())["costs"]
    assert [(cost["requests"], cost["width"], cost["depth"]) for cost in costs] == [(2, 1, 3), (2, 3, 3)]
    assert all(cost["read_ms"] > 0 and cost["draft_ms"] > 0 for cost in costs)
