"""Writes simulator/profiles/*-measured.json from forwards that `flotilla bench forward` has timed on one GPU.

The records have six shapes of batches at one length of context. What a token of context costs is attention's
share of the largest batch, where the record has kernels, and goes by the bytes of keys and values elsewhere.
Forwards of more tokens than were timed, those of prompts, are as fast as the record's large product, which no
forward exceeds; with weights of eight bits they go on as those timed. What a step takes besides was measured
in a served cell (docs/gpu.md).

    PYTHONPATH=. .venv/bin/python scripts/fit_measured.py docs/results
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from fit_hardware import GOOD, MEMORY_SHARE, rounded
from scipy.optimize import nnls

from benchmarks.forward_floor import Sizes
from cluster.linear_cost import LinearCost
from simulator.hardware import PROFILES, DrafterProfile, HardwareProfile, Trips
from simulator.roofline import ACCELERATORS, BYTES

KNEES = (8, 16, 32, 64, 96, 128, 192, 256)
#: Tokens of prompts whose forwards are taken to be bound by arithmetic.
PROMPTS = (1024, 2048)
# A step of the demo family beside its forwards, with 1 and 13 requests (docs/results/h200-served.json): the
# verifier 0.35 and 0.72 ms, messages 0.15, scheduling 0.21 for one; for more, where few arrive, 15 us each
# (0.70 ms for 48, on another machine: of 0.93 ms for 13 there most was for those that arrived).
TRIPS = Trips(verify_s=6.6e-4, verify_request_s=4.5e-5, draft_s=7.3e-4, draft_request_s=4.1e-5)
#: A draft call beside its layers (docs/results/h200-draft.json): 1.18 ms less five times 0.09.
CALL_S = 7.3e-4


@dataclass(frozen=True)
class Measured:
    """A profile to write: names, and the record of the target."""

    name: str
    target: str
    record: str


CELLS = [
    Measured("llama-8b-h200-measured", "a shape like Llama-3.1-8B", "8b"),
    Measured("qwen-32b-h200-measured", "a shape like Qwen3-32B", "32b"),
    Measured("llama-70b-fp8-h200-measured", "a shape like Llama-3.1-70B, weights of eight bits", "70b-fp8"),
]


def sizes_of(record: dict[str, Any]) -> Sizes:
    """What was timed."""
    return Sizes(**record["sizes"])


def context_seconds(record: dict[str, Any]) -> float | None:
    """Seconds of a token of context, by attention in the largest plain batch; None without kernels."""
    most = max((one for one in record["results"] if one["rows"] == 1), key=lambda one: one["requests"])
    kernels = [one for one in most.get("kernels", ()) if one["name"] == "attend"]
    return (
        sum(one["us"] for one in kernels) * 1e-6 / (most["requests"] * record["context"]) if kernels else None
    )


def fit(record: dict[str, Any], alpha: float) -> tuple[LinearCost, str]:
    """The linear model with a knee that is nearest to the record by relative error; and that error."""
    sizes, context = sizes_of(record), record["context"]
    points = [
        (one["requests"], one["requests"] * one["rows"], one["captured"]["ms"] * 1e-3)
        for one in record["results"]
    ]
    rate = record["operations_per_second"]
    if record["quantization"] is None:
        points += [(1, tokens, 2 * sizes.multiplied * tokens / rate) for tokens in PROMPTS]
    requests, tokens, seconds = np.array(points).T
    left = seconds - alpha * requests * np.where(tokens > max(KNEES), 0, context)
    best: tuple[float, LinearCost, str] | None = None
    for knee in KNEES:
        columns = np.stack([tokens, requests, np.ones(len(points)), np.maximum(tokens - knee, 0.0)], axis=1)
        solved, residual = nnls(columns / seconds[:, None], left / seconds)
        if best is None or residual < best[0]:
            gamma, rho, delta, gamma_knee = solved.tolist()
            off = np.abs(columns @ solved - left) / seconds
            timed = off[: len(record["results"])]
            error = f"{np.median(timed):.1%} median, {np.max(timed):.1%} largest over {len(timed)} forwards"
            cost = LinearCost(
                alpha=alpha, gamma=gamma, rho=rho, delta=delta, gamma_knee=gamma_knee, knee_tokens=float(knee)
            )
            best = residual, cost, error
    assert best is not None
    return best[1], best[2]


def main() -> None:
    """Fit every record and write its profile."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("records", type=Path, help="folder with h200-forward-*.json")
    folder = parser.parse_args().records
    records = {
        name: json.loads((folder / f"h200-forward-{name}.json").read_text())
        for name in ("1b", *(cell.record for cell in CELLS))
    }
    alpha = context_seconds(records["8b"])
    assert alpha is not None
    per_number = alpha / sizes_of(records["8b"]).kv_numbers
    drafter_alpha = context_seconds(records["1b"]) or 0.0
    drafter_cost, _ = fit(records["1b"], drafter_alpha)
    drafter = DrafterProfile(
        model="a shape like Llama-3.2-1B", cost=drafter_cost, quality=GOOD, call_s=CALL_S
    )
    for cell in CELLS:
        record = records[cell.record]
        numbers = sizes_of(record).kv_numbers
        cost, error = fit(record, per_number * numbers)
        gpu = ACCELERATORS["H200"]
        sizes = sizes_of(record)
        embedding = 0 if sizes.tied else sizes.vocab * sizes.hidden * BYTES  # of which a forward reads a row
        weights = record["weight_bytes"] + embedding + records["1b"]["weight_bytes"]
        memory = (MEMORY_SHARE - 0.05) * gpu.memory - weights
        made = HardwareProfile(
            name=cell.name,
            target=f"{cell.target}, tensor parallel 1",
            hardware="1x H200",
            source="measured forwards of this engine, 26 November 2026 (docs/gpu.md); prompts by "
            + ("the rate of a large product" if record["quantization"] is None else "those of 256 tokens"),
            error=error,
            cost=cost,
            num_slots=int(memory / (BYTES * numbers)),
            max_tokens=32768,
            drafters={"1b": drafter},
            overhead_s=TRIPS.verify_s + TRIPS.draft_s,
            trips=TRIPS,
            quantization=record["quantization"],
        )
        data = msgspec.json.format(msgspec.json.encode(rounded(made)), indent=2)
        (PROFILES / f"{cell.name}.json").write_bytes(data + b"\n")
        print(
            f"{cell.name}: {1e3 * made.baseline_s():.1f} ms a token alone, knee {made.cost.knee(16)} tokens, "
            f"{made.num_slots} slots; {made.error}"
        )


if __name__ == "__main__":
    main()
