"""Whether a request is predicted to miss its objectives, and how that is told."""

from __future__ import annotations

from cluster.stream_messages import Objective, Prediction


def exceeds(objective: Objective, predicted: Prediction, tolerance: float) -> bool:
    """Whether a prediction is above its objective by more than a share of it."""
    return any(
        target is not None and latency > (1.0 + tolerance) * target
        for target, latency in (
            (objective.ttft_ms, predicted.ttft_ms),
            (objective.tpot_ms, predicted.tpot_ms),
            (objective.e2e_ms, predicted.e2e_ms),
        )
    )


def compared(objective: Objective, predicted: Prediction) -> str:
    """The predictions beside the objectives that they are held against."""
    pairs = (
        ("ttft_ms", objective.ttft_ms, predicted.ttft_ms),
        ("tpot_ms", objective.tpot_ms, predicted.tpot_ms),
        ("e2e_ms", objective.e2e_ms, predicted.e2e_ms),
    )
    told = [f"{name} {latency:.1f} for {target:.1f}" for name, target, latency in pairs if target is not None]
    return f"predicted {', '.join(told)} asked"
