"""What one forward pass costs: a grid of batch size by rows per request, for each runner, interleaved.

python -m benchmarks.forward_cost MODEL_DIR [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import describe
from engine.device_rows import all_rows
from engine.loading import load_runner
from engine.runner import ModelRunner, Segment

GRID = ((1, 1), (1, 4), (1, 8), (1, 16), (8, 1), (8, 4), (32, 1))


def batch(requests: int, rows: int, context: int, vocab_size: int, num_slots: int) -> list[Segment]:
    """A batch in steady state: `context` tokens in runs of 8 slots, then a flat tree of `rows` rows."""
    rng = np.random.default_rng(0)
    slots = rng.permutation(np.arange(num_slots // 8 * 8, dtype=np.int32).reshape(-1, 8)).reshape(-1)
    visible = np.eye(rows, dtype=np.bool_)
    visible[:, 0] = True
    segments = []
    for index in range(requests):
        own = slots[index * (context + rows) : (index + 1) * (context + rows)]
        segments.append(
            Segment(
                tokens=rng.integers(0, vocab_size, rows).astype(np.int32),
                positions=np.minimum(np.arange(rows, dtype=np.int32), 1) + np.int32(context),
                slots=own[context:],
                past=own[:context],
                visible=visible if rows > 1 else None,
            )
        )
    return segments


def measure(
    runners: dict[str, ModelRunner], *, context: int, repeats: int, grid: Sequence[tuple[int, int]] = GRID
) -> list[dict[str, Any]]:
    """Median milliseconds of CPU time per forward, one row per grid point, runners taking turns.

    CPU time of the calling thread, so that other work on the machine disturbs it little; it equals wall
    time on an idle machine with one PyTorch thread. Every row of the batch yields logits.
    """
    results = []
    for requests, rows in grid:
        ways = {
            name: (runner, batch(requests, rows, context, runner.shape.vocab_size, runner.num_slots))
            for name, runner in runners.items()
        }
        results.append({"requests": requests, "rows": rows, "ms": in_turns(ways, repeats)})
    return results


def in_turns(ways: Mapping[str, tuple[ModelRunner, list[Segment]]], repeats: int) -> dict[str, float]:
    """Median milliseconds of CPU time of each way to forward as many rows, one after the other, by name."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 2):
        for name, (runner, segments) in ways.items():
            keep = all_rows(segments)
            start = time.thread_time()
            runner.forward(segments, keep)
            if repeat >= 2:
                times[name].append((time.thread_time() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the model directory named on the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="model directory")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--runners", default="lean,hf", help="comma-separated: lean, hf")
    parser.add_argument("--context", type=int, default=256, help="tokens before the rows (default 256)")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    arguments = parser.parse_args(argv)
    num_slots = max(requests * (arguments.context + rows) for requests, rows in GRID) + 8
    runners = {
        kind: load_runner(arguments.model, dtype=arguments.dtype, num_slots=num_slots, runner=kind)
        for kind in arguments.runners.split(",")
    }
    results = measure(runners, context=arguments.context, repeats=arguments.repeats)
    names = list(runners)
    header = "".join(f"{name + ' ms':>10}" for name in names)
    ratio = f"{names[1] + '/' + names[0]:>10}" if len(names) == 2 else ""
    print(f"{'requests':>8}{'rows':>6}{header}{ratio}")
    for result in results:
        line = "".join(f"{result['ms'][name]:10.2f}" for name in names)
        if ratio:
            line += f"{result['ms'][names[1]] / result['ms'][names[0]]:10.2f}"
        print(f"{result['requests']:8}{result['rows']:6}{line}")
    if arguments.json is not None:
        report = {
            "environment": describe(),
            "model": str(arguments.model),
            "dtype": arguments.dtype,
            "context": arguments.context,
            "unit": "ms of CPU time per forward, median",
            "results": results,
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
