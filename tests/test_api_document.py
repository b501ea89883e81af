"""docs/api.md names every field a request may have and every field a receipt holds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster.stream_messages import Objective
from deployments.openai_schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    SloFields,
    SpeculationFields,
)
from deployments.receipts import ChoiceOutcome, metrics

# Without blocks of code: their fences would be taken for quotes.
DOCUMENT = re.sub(
    r"```.*?```", "", (Path(__file__).parents[1] / "docs" / "api.md").read_text(), flags=re.DOTALL
)
NAMED = set(re.findall(r"[a-z0-9_]+(?:\.[a-z0-9_]+)?", " ".join(re.findall(r"`([^`]+)`", DOCUMENT))))


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest, SloFields, SpeculationFields])
def test_every_request_field_is_documented(schema: type[GenerationRequest]) -> None:
    assert set(schema.model_fields) <= NAMED


def dotted_names(receipt: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in receipt.items():
        if isinstance(value, dict) and value:
            yield from dotted_names(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_receipt_field_is_documented() -> None:
    outcome = ChoiceOutcome(
        num_prompt_tokens=1, num_output_tokens=1, receipt=None, ttft_ms=1.0, e2e_ms=1.0, tpot_ms=None
    )
    assert set(dotted_names(metrics([outcome], Objective(), seed=0))) <= NAMED
