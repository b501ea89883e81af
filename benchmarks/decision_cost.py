"""What deciding the tokens of a verify call takes, by rows and by what is asked: logits there, tokens here.

python -m benchmarks.decision_cost [--device cuda] [--rows 1 16 64] [--vocab 128256] [--json FILE]

On a GPU by Triton and by torch alone. Each row is of another request, and its logits fall with the rank of a
token as probabilities of words do (Zipf), so that a nucleus is of tens of tokens and not of all.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import torch

from benchmarks import tables
from benchmarks.environment import describe
from benchmarks.kernel_search import bandwidth_of
from engine.devices import Stopwatch, resolve_device, seconds_of, synchronize
from engine.process import tune_process
from engine.sampling import Row, TokenHistory, decide
from engine.sampling_params import SamplingParams
from engine.triton_support import runs_triton

#: What is asked of the next token, by name.
ASKED = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "top_k, top_p, min_p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02),
    "top_p, penalties": SamplingParams(
        temperature=0.8, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.3, presence_penalty=0.3
    ),
}
#: Tokens of a request's prompt and of its output, which penalties look at.
_PROMPT_TOKENS, _OUTPUT_TOKENS = 1024, 256
_EXPONENT = 1.5
_WARM_UP = 3
#: Work that a GPU is given before a decision, so that it meets all launches of one queued.
_BUSY_S, _BUSY_BYTES = 5e-3, 64 << 20


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians of one case, in microseconds.

    Attributes:
        asked: of each row, a name of `ASKED`.
        rows: decided.
        way: triton, or torch.
        wall_us: until tokens and gaps are on the host, of an idle device.
        host_us: of it, until all is launched; on a CPU, all but the last conversion.
        device_us: from the first launch to the last, of a device that was busy until then; with what the
            device waits for, where the host has to know a result in between (`top_p` of torch).
    """

    asked: str
    rows: int
    way: str
    wall_us: float
    host_us: float
    device_us: float


class Busy:
    """Keeps a GPU at work for some milliseconds."""

    def __init__(self, device: torch.device) -> None:
        """Nothing to do on a CPU, which runs nothing behind."""
        self._copies = 0
        if device.type == "cuda":
            self._source = torch.zeros(_BUSY_BYTES, dtype=torch.uint8, device=device)
            self._target = torch.empty_like(self._source)
            self._target.copy_(self._source)
            each = seconds_of(lambda: self._target.copy_(self._source), device)[1]
            self._copies = max(1, round(_BUSY_S / each))

    def launch(self) -> None:
        """Launch it."""
        for _ in range(self._copies):
            self._target.copy_(self._source)


@contextmanager
def without_triton() -> Iterator[None]:
    """Within it nothing is computed by Triton, as on a machine without a C compiler (`why_not_triton`)."""
    kept = {name: os.environ.pop(name) for name in ("TRITON_INTERPRET", "CC", "PATH") if name in os.environ}
    os.environ["PATH"] = ""
    runs_triton.cache_clear()
    try:
        yield
    finally:
        del os.environ["PATH"]
        os.environ.update(kept)
        runs_triton.cache_clear()


def zipf_logits(rows: int, vocab: int, device: torch.device) -> torch.Tensor:
    """Float32 [rows, vocab], the logarithms of Zipf's frequencies, each row in an order of its own."""
    generator = torch.Generator().manual_seed(0)
    falling = -_EXPONENT * torch.arange(1, vocab + 1).float().log()
    return torch.stack([falling[torch.randperm(vocab, generator=generator)] for _ in range(rows)]).to(device)


def rows_asking(params: SamplingParams, rows: int, vocab: int) -> list[Row]:
    """One decision of each of so many requests, each with a seed and a history of its own."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(rows):
        history = None
        if params.has_penalties:
            history = TokenHistory(
                rng.integers(0, vocab, _PROMPT_TOKENS).tolist(),
                rng.integers(0, vocab, _OUTPUT_TOKENS).tolist(),
            )
        own = msgspec.structs.replace(params, seed=number)
        found.append(Row(own, _OUTPUT_TOKENS, history))
    return found


def measure(logits: torch.Tensor, asked: str, busy: Busy, repeats: int) -> list[Cost]:
    """Time decisions of all rows of `logits` [rows, vocab], by Triton, where it serves, and by torch."""
    device = logits.device
    rows = rows_asking(ASKED[asked], len(logits), logits.shape[1])
    found = []
    for way in ("triton", "torch") if runs_triton(device) else ("torch",):
        with without_triton() if way == "torch" else nullcontext():
            runs_triton(device)  # looks through folders the first time
            times = [_timed(logits, rows, busy) for _ in range(_WARM_UP + repeats)][_WARM_UP:]
        wall, host, on_device = (1e6 * median(one) for one in zip(*times, strict=True))
        found.append(Cost(asked, len(rows), way, wall_us=wall, host_us=host, device_us=on_device))
    return found


def _timed(logits: torch.Tensor, rows: Sequence[Row], busy: Busy) -> tuple[float, float, float]:
    """Seconds: to tokens on the host, to all being launched, of the device."""
    synchronize(logits.device)
    start = time.perf_counter()
    decision = decide(logits, rows)
    launched = time.perf_counter()
    decision.fetch()
    there = time.perf_counter()
    busy.launch()
    watch = Stopwatch(logits.device)
    decide(logits, rows)
    watch.stop()
    return there - start, launched - start, watch.seconds()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all cases, print and save; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default auto)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--vocab", type=int, default=128_256, help="tokens (default 128256, Llama 3's)")
    parser.add_argument("--repeats", type=int, default=21, help="decisions per case; medians count")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    options = parser.parse_args(argv)
    tune_process()
    device = resolve_device(options.device)
    bandwidth, busy = bandwidth_of(device), Busy(device)
    costs: list[Cost] = []
    with tables.progress() as bar:
        task = bar.add_task("decisions", total=len(options.rows) * len(ASKED))
        for rows in options.rows:
            logits = zipf_logits(rows, options.vocab, device)
            for asked in ASKED:
                costs += measure(logits, asked, busy, options.repeats)
                bar.advance(task)
    floors = {rows: 4 * rows * options.vocab / bandwidth * 1e6 for rows in options.rows}
    name = str(device) if device.type == "cpu" else torch.cuda.get_device_name(device)
    title = f"Decisions of {options.vocab:,} tokens, {name}, {bandwidth / 1e9:,.0f} GB/s (medians, us)"
    heads = ["asked", "rows", "by", "to the host", "launched", "device", "logits read once"]
    lines = [
        [
            cost.asked,
            str(cost.rows),
            cost.way,
            *(tables.number(value, 1) for value in (cost.wall_us, cost.host_us, cost.device_us)),
            tables.number(floors[cost.rows], 1),
        ]
        for cost in costs
    ]
    tables.console.print(tables.plain_table(title, heads, lines))
    record = {
        "benchmark": "decision_cost",
        "environment": describe(),
        "device": name,
        "vocab": options.vocab,
        "bytes_per_second": bandwidth,
        "costs": [asdict(cost) | {"floor_us": floors[cost.rows]} for cost in costs],
    }
    tables.write_json(options.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
