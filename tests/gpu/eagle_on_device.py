"""EAGLE's drafts on a device, and whether two are the same; for tests, each of which may travel alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.eagle_loading import EagleFiles
from engine.loading import load_runner
from engine.proposals import Proposals
from engine.runner import ModelRunner
from engine.sampling_params import SamplingParams
from verifier.eagle_drafts import EagleDrafts

SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=99),
    SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=99),
]


def assert_same_choices(one: Proposals, other: Proposals) -> None:
    """But for those that are ruled out, where a row has fewer that are not: any token stands there."""
    is_choice = other.logp > -np.inf
    np.testing.assert_array_equal(one.logp > -np.inf, is_choice)
    np.testing.assert_array_equal(one.token[is_choice], other.token[is_choice])
    np.testing.assert_array_equal(one.parent[is_choice], other.parent[is_choice])


def drafting(files: EagleFiles, target: Path, device: str) -> tuple[EagleDrafts, ModelRunner]:
    """Of a target of 512 slots."""
    runner = load_runner(
        target,
        num_slots=512,
        attention="triton" if device == "cuda" else "padded",
        device=device,
        self_test=False,
        feature_layers=files.layers,
        beside=files.beside("float32", 64),
    )
    layer, reading = files.load(runner, 64)
    return EagleDrafts(layer, reading, runner.shape.max_tokens), runner
