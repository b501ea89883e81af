"""The receipt's counters of speculation, from those of the cell."""

from __future__ import annotations

import pytest

from cluster.stream_messages import Objective, Receipt
from deployments.receipts import ChoiceOutcome, metrics


def outcome(steps: int, accepted: int, tokens: int) -> ChoiceOutcome:
    receipt = Receipt(
        queue_ms=0.0,
        ttft_ms=1.0,
        tpot_ms=1.0,
        e2e_ms=float(tokens),
        num_prompt_tokens=3,
        num_cached_tokens=0,
        num_output_tokens=tokens,
        num_steps=steps,
        num_drafted=accepted,
        num_verified=accepted,
        num_accepted=accepted,
        drafters={"small": accepted},
        num_preemptions=0,
    )
    return ChoiceOutcome(3, tokens, receipt, ttft_ms=1.0, e2e_ms=float(tokens), tpot_ms=1.0)


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ([outcome(4, 6, 10)], 10 / 4),
        ([outcome(2, 1, 2)], 1.0),  # the stop token was drafted: it ends a step that has no bonus token
        ([outcome(2, 1, 2), outcome(2, 2, 4)], 6 / 4),
        ([outcome(2, 1, 40)], 3 / 2),  # the others were committed in an earlier life
    ],
)
def test_the_mean_acceptance_length_is_tokens_per_step(choices: list[ChoiceOutcome], expected: float) -> None:
    told = metrics(choices, Objective(), 0)["speculative_decoding"]
    assert told["mean_acceptance_length"] == round(expected, 3)
    assert told["num_accepted_draft_tokens"] == sum(
        one.receipt.num_accepted for one in choices if one.receipt
    )
