"""Writes simulator/acceptance.json: how requests and positions differ, from measured acceptance.

From the accepted lengths of Llama-3.1-8B with EAGLE at every output position (SpecDecode-Bench): the spread
of rates between requests, and the correlation of neighbouring positions. From Sequoia's acceptance by
sibling: the share of what the first choice leaves that goes to each further one. How sure drafters are when
they are right leaves no trace in accepted lengths, so the concentration is set, not fitted: 1, mostly sure or
mostly unsure.

    .venv/bin/python scripts/fit_acceptance.py ../shared/data/specdec
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from simulator.acceptance import FITTED, AcceptanceModel, DraftQuality, choices

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
SOURCES = {"chat": "llama31_8b_acceptance_sharegpt", "code": "llama31_8b_acceptance_instructcoder"}
# Fewer positions than this say little of a request's rate.
LEAST_POSITIONS = 64
# Of the variance of rates between requests, what drafters have in common, as measured on the demo family.
SHARED_VARIANCE = 0.75
SIMULATED_REQUESTS, SIMULATED_POSITIONS = 300, 256
DEPTHS = 6


def measured(path: Path) -> list[Int64]:
    """Accepted draft tokens at every position, by request."""
    with gzip.open(path, "rt") as lines:
        rows = [np.array(json.loads(line)["acc_eagle"]["acc_len"]) - 1 for line in lines]
    return [row for row in rows if len(row) >= LEAST_POSITIONS]


def rate_and_spread(requests: list[Int64]) -> tuple[float, float]:
    """Mean rate of the first draft token, and its spread between requests in logits, noise removed."""
    rates = np.array([(row > 0).mean() for row in requests])
    noise = np.mean([rate * (1.0 - rate) / len(row) for rate, row in zip(rates, requests, strict=True)])
    mean = float(rates.mean())
    return mean, float(np.sqrt(max(rates.var() - noise, 0.0)) / (mean * (1.0 - mean)))


def lag_correlation(requests: list[Int64]) -> float:
    """Mean correlation, within requests, of whether neighbouring positions accept."""
    found = []
    for row in requests:
        right = (row > 0).astype(float)
        if 0.0 < right.mean() < 1.0:
            found.append(np.corrcoef(right[1:], right[:-1])[0, 1])
    return float(np.nanmean(found))


def survival(requests: list[Int64]) -> Float64:
    """float64 [DEPTHS]: chance of at least 1, 2, ... accepted draft tokens, mean over requests."""
    depths = range(1, DEPTHS + 1)
    return np.array([np.mean([(row >= depth).mean() for row in requests]) for depth in depths])


def simulated(model: AcceptanceModel, rate: float) -> list[Int64]:
    """The same from the model: how long the first choice is right from each position on."""
    quality, runs = DraftQuality(rate={"*": rate}), []
    for seed in range(SIMULATED_REQUESTS):
        said = choices(
            model, quality, "any", seed, 0, num_positions=SIMULATED_POSITIONS, num_astray=0, width=2
        )
        run, lengths = 0, []
        for is_right in (said.rank == 0)[::-1].tolist():
            run = run + 1 if is_right else 0
            lengths.append(run)
        runs.append(np.array(lengths[::-1]))
    return runs


def second_share(vector: list[float], model: AcceptanceModel) -> float:
    """The share with which the second to fourth sibling are right as often as measured."""
    rate, wanted = vector[1], sum(vector[2:5])
    quality = DraftQuality(rate={"*": rate})
    best = (float("inf"), 0.0)
    for share in np.arange(0.15, 0.65, 0.01).tolist():
        trial = msgspec.structs.replace(model, second_share=share, request_spread=0.0, own_spread=0.0)
        said = choices(trial, quality, "any", 0, 0, num_positions=20_000, num_astray=0, width=4)
        best = min(best, (abs(float(said.probability[:, 1:].sum(axis=1).mean()) - wanted), share))
    return round(best[1], 2)


def main() -> None:
    """Fit both classes and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("specdec", type=Path, help="folder with the acceptance files")
    folder = parser.parse_args().specdec
    vector = json.loads((folder / "sequoia_acceptance_rate_vector.json").read_text())
    models, checks = {}, {}
    for name, stem in SOURCES.items():
        requests = measured(folder / f"{stem}.jsonl.gz")
        rate, spread = rate_and_spread(requests)
        model = AcceptanceModel(
            request_spread=round(spread * SHARED_VARIANCE**0.5, 3),
            own_spread=round(spread * (1.0 - SHARED_VARIANCE) ** 0.5, 3),
        )
        model = msgspec.structs.replace(
            model, second_share=second_share(vector["acceptance_rate_vector"], model)
        )
        # Nearly proportional to the persistence of the latent: one trial gives the slope.
        wanted, trial = lag_correlation(requests), msgspec.structs.replace(model, persistence=0.5)
        slope = (
            lag_correlation(simulated(trial, rate)) - lag_correlation(simulated(_free(model), rate))
        ) / 0.5
        persistence = min(0.95, max(0.0, wanted / slope))
        model = msgspec.structs.replace(model, persistence=round(persistence, 3))
        models[name] = msgspec.to_builtins(model)
        runs = simulated(model, rate)
        checks[name] = {
            "measured rate": round(rate, 3),
            "measured survival": survival(requests).round(3).tolist(),
            "model survival": survival(runs).round(3).tolist(),
            "measured lag correlation": round(wanted, 3),
            "model lag correlation": round(lag_correlation(runs), 3),
        }
        print(name, models[name], checks[name])
    FITTED.write_text(json.dumps({"models": models, "checks": checks}, indent=2) + "\n")


def _free(model: AcceptanceModel) -> AcceptanceModel:
    return msgspec.structs.replace(model, persistence=0.0)


if __name__ == "__main__":
    main()
