"""Drafts after a captured read, whose first layer is captured, too: those of a CPU, in a launch a layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from engine.eagle_loading import EagleFiles
from engine.moving_rows import BeamShape
from engine.sampling_params import SamplingParams
from tests.eagle_reference import EagleReference
from tests.emulated_cuda import Emulation
from tests.gpu.eagle_on_device import Decoding, assert_same_choices, drafting, reading
from verifier import eagle_graphs
from verifier.eagle_growing import GrowingShape
from verifier.proposing import Asking

DEPTH = 3
STOPS = ((), (2, 3, 44), (5,))
GREEDY = [SamplingParams(temperature=0.0, max_tokens=99, stop_token_ids=stops) for stops in STOPS]
# Two that sample, each in its own way, and a greedy one between.
SAMPLED = [
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=99, stop_token_ids=STOPS[0]),
    GREEDY[1],
    SamplingParams(temperature=1.3, top_k=20, min_p=0.01, seed=4, max_tokens=99, stop_token_ids=STOPS[2]),
]


def decoding(
    target: Path, tmp_path: Path, device: str, samplings: Sequence[SamplingParams] = GREEDY
) -> Decoding:
    """Three requests, each with its own stop tokens; reads are captured at once."""
    reference = EagleReference(LlamaForCausalLM.from_pretrained(target).eval(), draft_tokens=range(2, 90))
    files = EagleFiles.of(reference.write(tmp_path / device), target)
    found = Decoding(*drafting(files, target, device), 3, samplings)
    if device == "cuda":
        reading(found.drafts)
    return found


def asking(decoding: Decoding, places: Sequence[int], width: int) -> list[Asking]:
    """For requests by their places among those read last, which were all of them."""
    return [Asking(decoding.states[i], [7], 0, width, DEPTH, i) for i in places]


def assert_same_drafts(there: Decoding, here: Decoding, places: Sequence[int], width: int) -> None:
    """Of such requests; captured where they are met for the second time."""
    mine, theirs = (one.drafts.propose(asking(one, places, width))() for one in (there, here))
    for got, expected in zip(mine, theirs, strict=True):
        assert got.token.shape == (DEPTH, width)
        assert_same_choices(got, expected)
        np.testing.assert_allclose(got.logp, expected.logp, atol=1e-3)


@pytest.mark.parametrize("samplings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("width", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_drafts_are_those_of_a_cpu(
    width: int, samplings: list[SamplingParams], target: Path, tmp_path: Path, cuda: torch.device
) -> None:
    """Of all that were read, of the first of them, and in another order, which no captured layer is for."""
    there, here = (decoding(target, tmp_path, device, samplings) for device in ("cuda", "cpu"))
    for number, (counts, places) in enumerate(
        [
            ((3, 9, 6), (0, 1, 2)),
            ((2, 1, 3), (0, 1, 2)),
            ((1, 2, 1), (2, 0, 1)),
            ((1, 1, 2), (0, 1)),
            ((1, 1, 1), (0, 1, 2)),
        ]
    ):
        for one in (there, here):
            one.step(dict(enumerate(counts)))
        assert_same_drafts(there, here, places, width)
        graphs = there.drafts._graphs
        assert graphs is not None
        growing = graphs._growing[GrowingShape(BeamShape(4, width), samplings is SAMPLED)]
        assert (growing is not None and growing.held is not None) == (number > 0)


@pytest.mark.parametrize(
    # Of the sampled ones, one is greedy.
    "samplings",
    [pytest.param(GREEDY, marks=pytest.mark.thorough, id="greedy"), pytest.param(SAMPLED, id="sampled")],
)
def test_a_draft_is_a_launch_a_layer(
    samplings: list[SamplingParams], target: Path, tmp_path: Path, emulated: Emulation
) -> None:
    there = decoding(target, tmp_path, "cuda", samplings)
    for _ in range(2):
        there.step({0: 2, 1: 2, 2: 2})
        there.drafts.propose(asking(there, (0, 1, 2), 1))()
    for places in ((0, 1, 2), (0, 1)):  # the last one may have read a part of a prompt
        there.step({0: 2, 1: 2, 2: 2})
        count = len(emulated.launches)
        there.drafts.propose(asking(there, places, 1))()
        assert emulated.launches[count:] == ["replay"] * DEPTH


def test_without_memory_for_it_the_first_layer_is_computed_as_ever(
    target: Path, tmp_path: Path, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = (decoding(target, tmp_path, device) for device in ("cuda", "cpu"))
    for one in (there, here):
        one.step({0: 3, 1: 3, 2: 3})
    for _ in range(2):
        assert_same_drafts(there, here, (0, 2, 1), 1)
    graphs = there.drafts._graphs
    assert graphs is not None
    (shape,) = graphs._growing.shapes
    assert shape == GrowingShape(BeamShape(4, 1), is_sampled=False)

    def full(*arguments: object) -> None:
        raise torch.cuda.OutOfMemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(eagle_graphs, "captured", full)
        assert_same_drafts(there, here, (0, 1, 2), 1)
    assert not graphs._growing.has_room
    assert_same_drafts(there, here, (0, 1, 2), 1)
    growing = graphs._growing[shape]
    assert growing is not None
    assert growing.held is None
