"""EAGLE's drafts on a device, and whether two are the same; for tests, each of which may travel alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.eagle_loading import EagleFiles
from engine.loading import load_runner
from engine.proposals import Proposals
from engine.runner import ModelRunner, Segment
from engine.sampling_params import SamplingParams
from tests.verifier.target import spec_of
from verifier.eagle_drafts import EagleDrafts
from verifier.eagle_reading_graphs import ReadingGraphs
from verifier.proposing import Asking, Read
from verifier.request_state import RequestState

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


def reading(drafts: EagleDrafts) -> ReadingGraphs:
    """Its captured reads, whose shapes are captured when they come for the first time."""
    graphs = drafts._reading_graphs
    assert graphs is not None
    graphs._captured._capture_at = graphs._captured._capture_at_beside = 1
    return graphs


class Decoding:
    """Requests whose target's forwards are read, step by step."""

    def __init__(
        self,
        drafts: EagleDrafts,
        runner: ModelRunner,
        number: int,
        samplings: Sequence[SamplingParams] = SAMPLINGS,
    ) -> None:
        self.drafts, self.runner = drafts, runner
        self.lengths = [0] * number
        self.states = [
            RequestState(spec_of(f"r{i}", [5 + i], samplings[i % len(samplings)]), runner.shape)
            for i in range(number)
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

    def asking(self, requests: Sequence[int], depth: int = 2, width: int = 2) -> list[Asking]:
        """For requests, by their places among those read last."""
        return [Asking(self.states[i], [7], 0, width, depth, place) for place, i in enumerate(requests)]
