"""Trees that a target on a GPU grows itself: begun before the answer that they go on from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from drafters.messages import DraftPlan
from engine.eagle_loading import EagleFiles
from engine.sampling_params import SamplingParams
from tests.eagle_reference import EagleReference
from tests.emulated_cuda import IS_NEEDED
from tests.gpu.eagle_on_device import SAMPLINGS, drafting
from tests.verifier.planned import ahead, in_turn, verdicts_of
from tests.verifier.target import spec_of
from verifier.verifier import Verifier

# Emulated, fewer: a shape is captured when it comes again, and replayed after.
REQUESTS, STEPS = (2, 3) if IS_NEEDED else (3, 4)


@pytest.mark.parametrize(
    ("width", "samplings"),
    [
        # Chains of greedy requests are among those of all samplings, and greedy layers those of the trees.
        pytest.param(1, SAMPLINGS[:1], marks=pytest.mark.thorough),
        (2, SAMPLINGS[:1]),
        (1, SAMPLINGS),
    ],
)
def test_planned_trees_are_those_that_would_have_been_sent(
    target: Path, tmp_path: Path, cuda: torch.device, width: int, samplings: list[SamplingParams]
) -> None:
    reference = EagleReference(LlamaForCausalLM.from_pretrained(target).eval(), draft_tokens=range(2, 90))
    files = EagleFiles.of(reference.write(tmp_path / "eagle"), target)
    specs = [spec_of(f"r{i}", [3, 14, 15 + i, 9], samplings[i % len(samplings)]) for i in range(REQUESTS)]
    plan = DraftPlan(depth=3, width=width)

    def served(overlaps: bool) -> Verifier:
        drafts, runner = drafting(files, target, "cuda")
        return Verifier(runner, proposer=drafts, device=cuda, overlaps=overlaps)

    expected = in_turn(served(overlaps=False), specs, plan, STEPS)
    found, begun = ahead(served(overlaps=True), specs, plan, STEPS)
    assert begun == [True] * STEPS + [False]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.num_tokens == theirs.num_tokens
        for one, other in zip(verdicts_of(mine), verdicts_of(theirs), strict=True):
            assert (one.tokens, one.nodes) == (other.tokens, other.nodes)
