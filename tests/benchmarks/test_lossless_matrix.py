"""What the matrix of served configurations says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks import lossless_matrix
from benchmarks.lossless import LosslessOptions
from benchmarks.tables import console
from cluster.config import FlotillaConfig


@pytest.mark.parametrize(("num_preemptions", "is_told"), [(0, True), (3, False)])
def test_forced_preemption_that_preempts_nobody_is_told(
    num_preemptions: int, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no draft was accepted: outputs that are equal then say nothing."""

    @contextmanager
    def running(config: FlotillaConfig) -> Iterator[str]:
        yield "http://nowhere"

    async def suite(options: LosslessOptions) -> dict[str, Any]:
        result = {"differences": [], "num_outputs": 6, "num_tokens": 9, "receipts": None}
        results = [result | {"num_preemptions": 0}, result | {"num_preemptions": num_preemptions}]
        return {"results": results, "num_unproven": 0}

    monkeypatch.setattr(lossless_matrix, "running", running)
    monkeypatch.setattr("benchmarks.lossless.run", suite)
    with console.capture() as shown:
        lossless_matrix.run(["chains", "preemption forced"], 6, None, 0)
    assert ("Nothing was preempted in `preemption forced`" in shown.get()) is is_told
