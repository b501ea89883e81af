"""How long a target waits for its scheduler is measured over the very messages of a cell."""

from __future__ import annotations

import pytest

from benchmarks import target_wait


@pytest.mark.parametrize("ahead", [False, True])
def test_all_steps_are_measured(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_wait, "WARM_STEPS", 4)
    wait = target_wait.measure("flotilla", 2, 6, ahead=ahead)
    assert wait.drafted > 0.5
    assert wait.work_ms > 0.0
    assert (wait.is_ahead > 0.5) is ahead
