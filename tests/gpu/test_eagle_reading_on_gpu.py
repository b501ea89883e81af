"""Captured reads of EAGLE's layer: what a CPU reads, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from engine.eagle_loading import EagleFiles
from engine.padded_segments import Shape
from engine.runner import ModelRunner, Segment
from tests.eagle_reference import EagleReference
from tests.emulated_cuda import Emulation
from tests.gpu.eagle_on_device import SAMPLINGS, assert_same_choices, drafting
from tests.verifier.target import spec_of
from verifier import eagle_drafts, eagle_reading_graphs
from verifier.eagle_drafts import EagleDrafts
from verifier.eagle_reading_graphs import ReadingGraphs
from verifier.proposing import Asking, Read
from verifier.request_state import RequestState

WIDTH, DEPTH = 2, 2


@pytest.fixture
def files(target: Path, tmp_path: Path) -> EagleFiles:
    reference = EagleReference(LlamaForCausalLM.from_pretrained(target).eval(), draft_tokens=range(2, 90))
    return EagleFiles.of(reference.write(tmp_path / "eagle"), target)


def reading(drafts: EagleDrafts) -> ReadingGraphs:
    """Its captured reads, whose shapes are captured when they come for the first time."""
    graphs = drafts._reading_graphs
    assert graphs is not None
    graphs._captured._capture_at = graphs._captured._capture_at_beside = 1
    return graphs


class Decoding:
    """Requests whose target's forwards are read, step by step."""

    def __init__(self, drafts: EagleDrafts, runner: ModelRunner, number: int) -> None:
        self.drafts, self.runner = drafts, runner
        self.lengths = [0] * number
        self.states = [
            RequestState(spec_of(f"r{i}", [5 + i], SAMPLINGS[i % 2]), runner.shape) for i in range(number)
        ]

    def step(self, counts: dict[int, int], *, is_asked: bool = True) -> None:
        """Forward and read so many more rows of some requests."""
        segments, reads, first = [], [], 0
        for i, rows in counts.items():
            length, slots = self.lengths[i], np.arange(60, dtype=np.int32) + np.int32(60 * i)
            numbers = np.arange(length, length + rows, dtype=np.int32)
            tokens = (7 * numbers + 3 * i) % 80 + 2
            segment = Segment(tokens, numbers, slots[length : length + rows], slots[:length])
            segments.append(segment)
            kept = np.arange(rows, dtype=np.int32) + np.int32(first)
            after = (7 * (numbers + 1) + 3 * i) % 80 + 2
            reads.append(Read(f"r{i}", kept, after, numbers, segment.slots, segment.past))
            first += rows
            self.lengths[i] = length + rows
        self.runner.forward(segments, np.arange(first, dtype=np.int32))
        self.drafts.read(reads, is_asked=is_asked)

    def asking(self, requests: Sequence[int], depth: int = DEPTH) -> list[Asking]:
        """For requests, by their places among those read last."""
        return [Asking(self.states[i], [7], 0, WIDTH, depth, place) for place, i in enumerate(requests)]


def test_what_is_read_is_what_a_cpu_reads(files: EagleFiles, target: Path, cuda: torch.device) -> None:
    """Of prompts, of a few rows each, of some requests, of rows that were put off, and in larger shapes."""
    there, here = (Decoding(*drafting(files, target, device), 3) for device in ("cuda", "cpu"))
    graphs = reading(there.drafts)
    steps: list[tuple[dict[int, int], bool]] = [
        ({0: 3, 1: 9, 2: 6}, True),
        ({0: 2, 1: 1, 2: 3}, True),
        ({0: 1, 1: 2}, False),
        ({2: 1, 0: 2}, True),  # with what was put off of the latter
        ({1: 1, 2: 2, 0: 1}, True),
        ({0: 1, 1: 1, 2: 1}, True),
    ]
    for number, (counts, is_asked) in enumerate(steps):
        if number == len(steps) - 1:  # padded to what was captured before
            graphs._captured._capture_at_beside = 9
        for one in (there, here):
            one.step(counts, is_asked=is_asked)
        if not is_asked:
            continue
        for requests in (list(counts), list(counts)[:-1]):
            mine, theirs = (one.drafts.propose(one.asking(requests))() for one in (there, here))
            for got, expected in zip(mine, theirs, strict=True):
                assert_same_choices(got, expected)
                np.testing.assert_allclose(got.logp, expected.logp, atol=1e-3)
    assert graphs.shapes == [Shape(4, 16, 0, 24), Shape(4, 4, 0, 8), Shape(2, 4, 0, 4)]


def test_a_read_is_a_replay_and_few_launches(
    files: EagleFiles, target: Path, emulated: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the first layer of drafts: of usual shapes, which are captured when loading."""
    monkeypatch.setattr(eagle_drafts, "_CAPTURED_ROWS", ())
    monkeypatch.setattr("engine.warm_up.CAPTURED_REQUESTS", (2,))
    monkeypatch.setattr("engine.warm_up._CAPTURED_ROWS", (4,))
    decoding = Decoding(*drafting(files, target, "cuda"), 2)
    decoding.drafts.warm_up()
    assert decoding.drafts._reading_graphs is not None
    assert decoding.drafts._reading_graphs.shapes == [Shape(2, 4, 0, 4), Shape(2, 1, 0, 2)]
    decoding.step({0: 6, 1: 5})
    for counts in ({0: 2, 1: 2}, {0: 1, 1: 1}):  # the first is padded to what a larger tree leaves
        launches = []
        for is_asked in (False, True):  # the forward of the target alone, and with the read
            count = len(emulated.launches)
            decoding.step(counts, is_asked=is_asked)
            launches.append(emulated.launches[count:])
            decoding.drafts.forget_all()
        before, found = launches
        assert sorted(found) == sorted([*before, "replay", "cat"])
        count = len(emulated.launches)
        decoding.drafts.propose(decoding.asking([0, 1], depth=1))()
        assert not {"replay", "mm", "addmm", "attend"} & set(emulated.launches[count:])


@pytest.mark.parametrize("without", ["captured", "_Static"])
def test_larger_reads_and_those_without_memory_go_the_ordinary_way(
    without: str, files: EagleFiles, target: Path, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = (Decoding(*drafting(files, target, device), 2) for device in ("cuda", "cpu"))
    graphs = reading(there.drafts)

    def full(*arguments: object) -> None:
        raise torch.cuda.OutOfMemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(eagle_reading_graphs, "MOST_ROWS", 8)
        for one in (there, here):
            one.step({0: 9, 1: 3})
    assert graphs.shapes == []
    with monkeypatch.context() as patch:
        patch.setattr(eagle_reading_graphs, without, full)
        for one in (there, here):
            one.step({0: 1, 1: 2})
    for one in (there, here):
        one.step({0: 1, 1: 2})
    assert graphs.shapes == []
    mine, theirs = (one.drafts.propose(one.asking([0, 1]))() for one in (there, here))
    for got, expected in zip(mine, theirs, strict=True):
        assert_same_choices(got, expected)
