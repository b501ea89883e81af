"""Captured reads of EAGLE's layer: what a CPU reads, in one launch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from engine.eagle_loading import EagleFiles
from engine.padded_segments import Shape
from tests.eagle_reference import EagleReference
from tests.emulated_cuda import Emulation
from tests.gpu.eagle_on_device import Decoding, assert_same_choices, drafting, reading
from verifier import eagle_drafts, eagle_reading_graphs


@pytest.fixture
def files(target: Path, tmp_path: Path) -> EagleFiles:
    reference = EagleReference(LlamaForCausalLM.from_pretrained(target).eval(), draft_tokens=range(2, 90))
    return EagleFiles.of(reference.write(tmp_path / "eagle"), target)


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
