"""Decisions are timed by Triton and without it, for rows as different requests have them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from benchmarks import decision_cost
from benchmarks.decision_cost import ASKED, Busy, main, measure, rows_asking, without_triton, zipf_logits
from engine.sampling import decide
from engine.sampling_params import SamplingParams
from engine.triton_support import runs_triton
from tests import emulated_cuda

CPU = torch.device("cpu")
only_without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="by the interpreter")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once is enough where nothing is compared; the interpreter takes blocks as they are."""
    monkeypatch.setattr(decision_cost, "_WARM_UP", 0)
    monkeypatch.setattr(decision_cost, "_BUSY_BYTES", 1 << 10)
    monkeypatch.setattr(decision_cost, "_BUSY_S", 1e-4)


def test_a_nucleus_is_of_tens_of_tokens() -> None:
    logits = zipf_logits(3, 128_256, CPU)
    assert (logits.argmax(-1).unique().numel(), logits.dtype) == (3, torch.float32)
    likely = (logits / ASKED["top_p"].temperature).softmax(-1).sort(descending=True).values.cumsum(-1)
    assert all(10 < int((row < ASKED["top_p"].top_p).sum()) < 100 for row in likely)


def test_rows_are_of_different_requests() -> None:
    for params in ASKED.values():
        rows = rows_asking(params, 5, 300)
        assert len({row.params.seed for row in rows}) == 5
        histories = [row.history for row in rows if row.history is not None]
        assert len(histories) == (5 if params.has_penalties else 0)
        assert len({tuple(history.output) for history in histories}) == len(histories)
    sampled = rows_asking(SamplingParams(temperature=5.0), 40, 300)
    assert len(set(decide(torch.zeros(40, 300), sampled).fetch()[0])) > 20


def test_all_that_can_be_asked_is_timed_on_a_cpu() -> None:
    for asked in ASKED:
        (cost,) = measure(zipf_logits(2, 300, CPU), asked, Busy(CPU), repeats=1)
        assert (cost.asked, cost.rows, cost.way) == (asked, 2, "torch")
        assert 0 < cost.host_us < cost.wall_us
        assert cost.device_us > 0


def environment() -> dict[str, str]:
    """Without what PyTorch's compiler sets for itself when it is first imported."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR_")}


@only_without_gpu
def test_a_gpu_is_timed_by_triton_and_by_torch() -> None:
    pytest.importorskip("triton")
    before = environment()
    with emulated_cuda.emulated_cuda() as emulation:
        device = torch.device("cuda", 0)
        logits, busy = zipf_logits(2, 300, device), Busy(device)
        assert runs_triton(device)
        with without_triton():
            assert not runs_triton(device)
            measure(logits, "temperature", busy, repeats=1)
            assert "scale_and_find_cuts" not in emulation.launches
        assert runs_triton(device)
        costs = measure(logits, "temperature", busy, repeats=1)
        assert "scale_and_find_cuts" in emulation.launches
    assert [cost.way for cost in costs] == ["triton", "torch"]
    assert all(0 < cost.host_us < cost.wall_us for cost in costs)
    assert environment() == before


def test_the_command_prints_each_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "decisions.json"
    sizes = ["--rows", "1", "3", "--vocab", "500", "--repeats", "1"]
    assert main(["--device", "cpu", *sizes, "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    cases = [(cost["rows"], cost["asked"]) for cost in record["costs"]]
    assert cases == [(rows, asked) for rows in (1, 3) for asked in ASKED]
    floor = record["costs"][-1]["floor_us"]
    assert floor == pytest.approx(4 * 3 * 500 / record["bytes_per_second"] * 1e6)
    out = capsys.readouterr().out
    assert all(asked in out for asked in ASKED)
