"""The decomposition benchmark: its lengths, its batches, and that all it compares compute the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import decomposition_lengths as lengths
from benchmarks.decomposition_attention import METHODS
from benchmarks.decomposition_setting import Shape, make_runner, make_segments


def test_lengths_of_traces_and_plain_numbers(tmp_path: Path) -> None:
    files = {
        "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,374,44\n",
        "mooncake.jsonl": '{"timestamp": 0, "input_length": 374, "output_length": 44, "hash_ids": []}\n',
        "plain.txt": "396\n\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        assert lengths.read_lengths(tmp_path / name) == [396]
    draw = lengths.source(tmp_path / "plain.txt")
    assert draw(np.random.default_rng(0), 3) == [396] * 3
    for text in ("", "TIMESTAMP,tokens\n1,2\n", "many\n"):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(ValueError, match="bad"):
            lengths.read_lengths(tmp_path / "bad")


def test_built_in_lengths_are_ragged_and_bounded() -> None:
    drawn = np.array(lengths.source(None)(np.random.default_rng(0), 500))
    assert drawn.min() >= lengths.SHORTEST
    assert drawn.max() <= lengths.LONGEST
    assert drawn.std() > 0.5 * drawn.mean()


def test_all_methods_compute_the_same() -> None:
    rng = np.random.default_rng(0)
    segments = make_segments(rng, [300, 40, 150, 700], 3)
    slots = np.concatenate([part for segment in segments for part in (segment.past, segment.slots)])
    assert sorted(slots.tolist()) == list(range(1190 + 12))
    runner, attention = make_runner(Shape("tiny", 32, 2, 4, 2, 8), 1202, seed=0)
    outputs, padding = [], {}
    for method in METHODS:
        attention.method = method
        outputs.append(runner.forward(segments, np.arange(12, dtype=np.int32)))
        padding[method] = runner.key_tokens.padding
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=1e-4, rtol=1e-4)
    assert padding["one rectangle"] == 4 * 703 - 1202
    assert padding["decomposed"] < 0.2 * padding["one rectangle"]
    assert padding["stitched"] <= padding["decomposed"]
