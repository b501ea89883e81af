"""The floors are those of the real models' sizes, and the command runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.forward_floor import CASES, SHAPES, fitting_cases, floors, random_transformers_model


def test_shapes_are_those_of_the_published_models() -> None:
    """Parameters in all: 8.03 and 32.8 billion; 1.24 billion with the embedding counted once."""
    for name, published in (("1b", 1.236e9), ("8b", 8.030e9), ("32b", 32.76e9), ("70b", 70.55e9)):
        sizes = SHAPES[name]
        embedding = 0 if sizes.tied else sizes.vocab * sizes.hidden
        assert sizes.multiplied + embedding == pytest.approx(published, rel=2e-3)
    assert SHAPES["8b"].kv_numbers * 2 == 131072


def test_floors() -> None:
    # 15.01 GB of weights and 1025 tokens of KV at 4 TB/s; two operations per weight and row at 800 TFLOP/s.
    memory, arithmetic = floors(SHAPES["8b"], SHAPES["8b"].weight_bytes(2), 2, 1, 1, 1024, 4e12, 8e14)
    assert memory == pytest.approx((15.01e9 + 1025 * 131072) / 4e12, rel=1e-3)
    assert arithmetic == pytest.approx(2 * 7.505e9 / 8e14, rel=1e-3)
    # A prompt is as many rows more, and has no context.
    beside = floors(SHAPES["8b"], SHAPES["8b"].weight_bytes(2), 2, 1, 1, 1024, 4e12, 8e14, 63)
    assert beside[0] - memory == pytest.approx(63 * 131072 / 4e12)
    assert beside[1] == pytest.approx(64 * arithmetic)
    # In eight bits 6.98e9 of them are a byte; the last product's 0.525e9 stay two.
    assert SHAPES["8b"].weight_bytes(2, "fp8") == pytest.approx(8.03e9, rel=1e-3)
    assert SHAPES["8b"].weight_bytes(2, "int4") == pytest.approx(4.81e9, rel=1e-3)


def test_cases_that_do_not_fit_are_left_out() -> None:
    """70B in eight bits on a GPU of 80 GB: 8 requests fit beside the weights, 64 do not."""
    kept = fitting_cases(CASES, 1024, SHAPES["70b"].kv_numbers * 2, 8 * 10**9)
    assert kept == [(1, 1), (1, 8), (8, 1), (8, 8)]
    assert fitting_cases(CASES, 1024, SHAPES["70b"].kv_numbers * 2, 65 * 10**9) == list(CASES)
    with pytest.raises(ValueError, match=r"0.1 GB are free beside the weights"):
        fitting_cases(CASES, 1024, SHAPES["70b"].kv_numbers * 2, 10**8)


@pytest.mark.parametrize("more", [["--prompt", "30"], ["--quantization", "fp8"], ["--runner", "hf"]])
def test_the_command_measures(more: list[str], tmp_path: Path) -> None:
    file = tmp_path / "forward.json"
    options = [
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--context",
        "20",
        "--repeats",
        "1",
        "--json",
        str(file),
    ]
    result = CliRunner().invoke(app, ["forward", *options, *more])
    assert result.exit_code == 0, result.output
    record = json.loads(file.read_text())
    assert record["attention"] == "PaddedAttention"
    assert record["quantization"] == ("fp8" if "fp8" in more else None)
    assert record["runner"] == ("hf" if "hf" in more else "lean")
    assert ("beside a prompt of 30" in result.output) == ("--prompt" in more) == (record["prompt"] == 30)
    for one in record["results"]:
        assert one["ordinary"]["ms"] > 0 < one["captured"]["ms"]
        assert one["floor_ms"] > 0
    first = record["results"][0]
    assert f"{first['ordinary']['ms']:.3f}" in result.output
    assert ("lean" in first) == ("hf" in more)
    if "hf" in more:
        assert f"{first['lean']['ms']:.3f}" in result.output


def test_a_transformers_model_has_the_shape_asked_for() -> None:
    """Its weights in the type asked for, and as many as a forward is said to read."""
    sizes = SHAPES["tiny"]
    for dtype, tied in ((torch.bfloat16, False), (torch.float32, True)):
        of = replace(sizes, tied=tied)
        model = random_transformers_model(of, dtype, torch.device("cpu"), 48)
        assert model.dtype == dtype
        matrices = sum(one.numel() for one in model.parameters() if one.dim() == 2)
        assert matrices == sizes.multiplied + (0 if tied else sizes.vocab * sizes.hidden)
        assert model.config.max_position_embeddings == 48


def test_a_transformers_model_is_not_quantized() -> None:
    result = CliRunner().invoke(app, ["forward", "--runner", "hf", "--quantization", "fp8"])
    assert result.exit_code != 0
    assert "is for the lean runner" in result.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--shape", "9b"], "tiny, 135m, 1b, 8b"),
        (["--dtype", "int8"], "bfloat16"),
        (["--runner", "vllm"], "lean or hf"),
        (["--quantization", "q4"], "fp8"),
    ],
)
def test_wrong_options_say_what_there_is(options: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["forward", *options])
    assert result.exit_code == 2
    assert says in result.output
