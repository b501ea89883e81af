"""Outcomes and requests made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.load_client import Outcome
from benchmarks.objectives import Slo
from benchmarks.prompts import Prompt
from benchmarks.workload import BenchRequest

MakeOutcome = Callable[..., Outcome]


@pytest.fixture
def make_outcome() -> MakeOutcome:
    def make(domain: str = "code", slo: Slo | None = None, **fields: Any) -> Outcome:
        request = BenchRequest(0, Prompt(domain, text="x"), max_tokens=8, slo=slo or Slo())
        return Outcome(request, **fields)

    return make
