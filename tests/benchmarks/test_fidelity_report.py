"""What `flotilla bench fidelity` and `acceptance` say of their figures and files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import fidelity
from benchmarks.acceptance_table import AcceptanceTable
from benchmarks.tables import console
from cluster.config import FlotillaConfig


def result(attainment: float, num_unanswered: int = 0) -> dict[str, Any]:
    """Of one test, in which the simulator is right but for an attainment of 0.3."""
    figures: dict[str, dict[str, Any]] = {
        name: {"served": 2.0, "simulated": 2.0, "error": 0.0, "own costs": 2.0, "error with own costs": 0.0}
        for name in (*fidelity._SHOWN, *fidelity._STEPS)
    }
    error = 0.3 / attainment - 1.0 if attainment else None
    figures["attainment"] |= {"served": attainment, "simulated": 0.3, "error": error}
    point = {"policy": "fixed", "load": 0.5, "figures": figures}
    return {"points": [point], "fitted": {}, "num_unanswered": num_unanswered}


def table(answers: int = 2) -> AcceptanceTable:
    rows = answers * 3
    return AcceptanceTable(
        drafters=["a"],
        domains=["code"] * answers,
        width=1,
        drafter=np.zeros(rows, np.int16),
        answer=np.repeat(np.arange(answers, dtype=np.int32), 3),
        position=np.tile(np.arange(1, 4, dtype=np.int32), answers),
        logp=np.zeros((rows, 1), np.float32),
        rank=np.zeros(rows, np.int8),
    )


def test_what_was_simulated_and_never_served_is_the_largest_error() -> None:
    assert fidelity.worst_error(result(0.25), fidelity.CALIBRATED) == (
        pytest.approx(0.2),
        "attainment of fixed at 0.5x",
    )
    size, where = fidelity.worst_error(result(0.0), fidelity.CALIBRATED)
    assert (math.isinf(size), where) == (True, "attainment of fixed at 0.5x")
    with console.capture() as shown:
        fidelity.show(result(0.0))
    assert "without bound (attainment of fixed at 0.5x), more than the 10%" in " ".join(shown.get().split())


def test_requests_without_an_answer_are_told() -> None:
    with console.capture() as shown:
        fidelity.show(result(0.3, num_unanswered=7))
    assert "7 requests of the tests were not answered" in shown.get()


@pytest.mark.parametrize("name", ["log.npz", "log"])
def test_a_log_is_found_again_whatever_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []

    def record_zoo(path: Path, config: FlotillaConfig, count: int | None) -> AcceptanceTable:
        asked.append(count)
        table().save(path)
        return table()

    monkeypatch.setattr("benchmarks.acceptance_log.record_zoo", record_zoo)
    with console.capture() as shown:
        for _ in range(2):
            assert len(fidelity.acceptance_log(tmp_path / name, 4)) == 6
    assert asked == [4]
    assert "--prompts is not looked at" in " ".join(shown.get().split())
    with pytest.raises(ValueError, match="no directory"):
        fidelity.acceptance_log(tmp_path / "nowhere" / name, 4)
    assert asked == [4]
