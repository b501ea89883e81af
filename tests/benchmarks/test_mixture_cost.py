"""What a mixture's forwards take is measured beside what reading its experts would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import mixture_cost
from benchmarks.mixture_cost import SHAPES, main, random_mixture


@pytest.mark.parametrize("runner", ["lean", "hf"])
def test_a_record_tells_forwards_and_both_fits(
    runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mixture_cost, "CONTEXTS", (8,))
    monkeypatch.setattr(mixture_cost, "ROWS", (1, 2, 4, 8, 16))
    file = tmp_path / "record.json"
    arguments = ["--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--repeats", "1"]
    assert main([*arguments, "--json", str(file), "--runner", runner, "--quantization", "fp8"]) == 0
    record = json.loads(file.read_text())
    assert (record["runner"], record["quantization"]) == (runner, "fp8")
    assert record["expert_share"] == 0.25
    assert record["why_not_captured"]
    assert record["with_experts"]["cost"]["expert_share"] == 0.25
    assert "expert_share" not in record["without"]["cost"] or not record["without"]["cost"]["expert_share"]
    floors = {one["rows"]: one["floor_ms"] for one in record["forwards"]}
    assert sorted(floors) == [1, 2, 4, 8, 16]
    assert floors[1] < floors[4] < floors[16]
    assert "fit with experts: median error" in capsys.readouterr().out


def test_weights_are_counted_as_the_model_has_them() -> None:
    sizes = SHAPES["tiny"]
    model = random_mixture(sizes, torch.float32, torch.device("cpu"), 64, None)
    counted = {name: weight.numel() for name, weight in model.named_parameters() if weight.dim() > 1}
    experts = sum(count for name, count in counted.items() if ".experts." in name)
    assert experts == sizes.expert_weights
    embedding = counted["model.embed_tokens.weight"]
    assert sum(counted.values()) - experts - embedding == sizes.shared_weights
