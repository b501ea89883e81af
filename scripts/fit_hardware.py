"""Writes simulator/profiles/*.json: forward times of models on accelerators as the linear model with a knee.

Where kernel tables were measured (aiconfigurator: A100, H100, H200), a forward is their sum, interpolated:
the layers' matrix products, decode attention, all-reduce and the output head. Elsewhere (V100) it is a
roofline estimate. Either way `LinearCost` is fitted to a grid of such forwards, and the error of that fit,
and of the kernel sums against whole-model measurements (splitwise), goes into the profile.

    .venv/bin/python scripts/fit_hardware.py ../shared/data/latency
"""

from __future__ import annotations

import argparse
import csv
import gzip
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RegularGridInterpolator
from scipy.optimize import nnls

from cluster.linear_cost import LinearCost, experts_read
from simulator.acceptance import DraftQuality
from simulator.hardware import PROFILES, DrafterProfile, HardwareProfile
from simulator.roofline import (
    ACCELERATORS,
    BYTES,
    MODELS,
    SMALL_KERNELS,
    Accelerator,
    Model,
    RooflineTimes,
    experts_seconds,
)

Float64 = NDArray[np.float64]


class Kernels:
    """Seconds of kernels from measured tables, interpolated in logarithms."""

    def __init__(self, folder: Path, prefix: str, version: str) -> None:
        gemm: dict[tuple[int, ...], list[float]] = defaultdict(list)
        for row in _rows(folder / f"{prefix}_gemm_{version}.csv.gz"):
            if row.get("gemm_dtype", "bfloat16") == "bfloat16":
                gemm[int(row["m"]), int(row["n"]), int(row["k"])].append(float(row["latency"]))
        self._gemm = _grid({key: min(values) for key, values in gemm.items()})
        decode: dict[tuple[int, ...], float] = {}
        for row in _rows(folder / f"{prefix}_attn_generation_{version}.csv.gz"):
            if row.get("head_dim", "128") != "128" or row.get("window_size", "0") != "0":
                continue
            shape = tuple(int(row[c]) for c in ("num_heads", "num_key_value_heads", "batch_size"))
            key = (*shape, int(row["step"]) + 1)
            decode[key] = min(decode.get(key, float("inf")), float(row["latency"]))
        self._decode = decode
        reduce: dict[int, dict[int, float]] = defaultdict(dict)
        for row in _rows(folder / f"{prefix}_allreduce_{version}.csv.gz"):
            if row["backend"].endswith("graph"):
                reduce[int(row["num_gpus"])][int(row["message_size"])] = float(row["latency"])
        self._reduce = reduce
        self._attention: dict[tuple[int, int], RegularGridInterpolator] = {}

    def product(self, m: int, n: int, k: int) -> float:
        """A matrix product."""
        return float(np.exp(self._gemm(np.log([[m, n, k]]))[0])) / 1e3

    def attention(self, heads: int, kv_heads: int, batch: int, context: int) -> float:
        """Decode attention of one layer; the table's shape with the nearest number of heads, scaled."""
        shapes = {(h, kv) for h, kv, _, _ in self._decode}
        near = min(shapes, key=lambda s: (abs(np.log(s[1] / kv_heads)), abs(np.log(s[0] / heads))))
        if near not in self._attention:
            part: dict[tuple[int, ...], float] = {
                (b, c): v for (h, kv, b, c), v in self._decode.items() if (h, kv) == near
            }
            self._attention[near] = _grid(part)
        scale = kv_heads / near[1] if kv_heads > near[1] else 1.0
        return scale * float(np.exp(self._attention[near](np.log([[batch, context]]))[0])) / 1e3

    def reduce(self, ranks: int, elements: int) -> float:
        """All-reduce of a layer's output."""
        if ranks == 1:
            return 0.0
        sizes = np.array(sorted(self._reduce[ranks]))
        values = np.array([self._reduce[ranks][size] for size in sizes])
        return float(np.exp(np.interp(np.log(elements), np.log(sizes), np.log(values)))) / 1e3


class TableTimes:
    """Forward times as sums of measured kernels."""

    def __init__(self, kernels: Kernels, gpu: Accelerator) -> None:
        self._kernels, self._gpu = kernels, gpu

    def seconds(self, model: Model, ranks: int, batch: int, tokens: int, context: int) -> float:
        """A forward of `tokens` rows over `batch` requests of `context` tokens each."""
        kernels, gpu = self._kernels, self._gpu
        total = sum(count * kernels.product(tokens, n, k) for count, n, k in model.products(ranks))
        total += experts_seconds(model, ranks, tokens, gpu)
        heads, kv = max(1, model.heads // ranks), max(1, model.kv_heads // ranks)
        # The table has heads of 128; narrower ones read proportionally less.
        attention = kernels.attention(heads, kv, batch, context) * model.head_dim / 128
        attention = max(attention, gpu.kernel_s)
        # More query tokens per request reuse the cache that is read, and cost their arithmetic.
        extra = (tokens - batch) * context * 4 * heads * model.head_dim / (gpu.flops * gpu.efficiency[1])
        total += model.layers * (attention + extra + SMALL_KERNELS * gpu.kernel_s)
        return total + 2 * model.layers * kernels.reduce(ranks, tokens * model.hidden)


Times = TableTimes | RooflineTimes


def fit(times: Times, model: Model, ranks: int, most_context: int) -> tuple[LinearCost, str]:
    """The linear model with a knee that fits a grid of forwards best, by relative error; and that error."""
    points = [
        (batch, tokens, context, times.seconds(model, ranks, batch, tokens, context))
        for batch in (1, 2, 4, 8, 16, 32, 64, 128)
        for tokens in sorted(
            {batch * per for per in (1, 2, 3, 5, 9)} | {batch + chunk for chunk in (256, 512, 1024, 2048)}
        )
        for context in (128, 512, 1024, 2048, 4096)
        if context <= most_context and tokens <= 2200
    ]
    data = np.array(points)
    batch, tokens, context, seconds = data.T
    best: tuple[float, LinearCost, Float64] | None = None
    for knee in (16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256, 320, 384, 512):
        past = np.maximum(tokens - knee, 0.0)
        columns = np.stack(
            [batch * context, tokens * context, tokens, batch, np.ones(len(data)), past], axis=1
        )
        if model.experts:
            columns = np.column_stack([columns, experts_read(tokens, model.expert_share)])
        weighted = columns / seconds[:, None]
        scale = np.linalg.norm(weighted, axis=0)
        solved, residual = nnls(weighted / scale, np.ones(len(data)))
        if best is None or residual < best[0]:
            alpha, beta, gamma, rho, delta, gamma_knee, *experts = (solved / scale).tolist()
            cost = LinearCost(
                alpha=alpha,
                beta=beta,
                gamma=gamma,
                rho=rho,
                delta=delta,
                gamma_knee=gamma_knee,
                knee_tokens=float(knee),
                experts_s=experts[0] if experts else 0.0,
                expert_share=model.expert_share,
            )
            best = residual, cost, np.abs(columns @ (solved / scale) / seconds - 1.0)
    assert best is not None
    _, cost, error = best
    return cost, f"{np.median(error):.1%} median, {np.max(error):.1%} largest over {len(data)} forwards"


def against_splitwise(path: Path, times: Times, gpu: str) -> str:
    """Kernel sums for Llama-2-70B beside measured decode times; what is between them is the framework's."""
    measured: dict[int, list[float]] = defaultdict(list)
    for row in _rows(path):
        columns = ("model", "hardware", "tensor_parallel", "prompt_size", "token_size")
        if tuple(row[column] for column in columns) == ("llama2-70b", gpu, "4", "512", "128"):
            measured[int(row["batch_size"])].append(float(row["token_time"]) / 1e3)
    parts = []
    for batch, held in sorted(measured.items()):
        if batch in (1, 16, 64):
            predicted = times.seconds(MODELS["Llama-2-70B"], 4, batch, batch, 576)
            parts.append(f"{batch}: {1e3 * predicted:.1f} against {1e3 * float(np.mean(held)):.1f} ms")
    return "; ".join(parts)


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", newline="") as lines:
        yield from csv.DictReader(lines)


def _grid(values: Mapping[tuple[int, ...], float]) -> RegularGridInterpolator:
    """Interpolator over a full grid of keys; holes take the value of the nearest smaller key's row."""
    axes = [np.array(sorted({key[i] for key in values})) for i in range(len(next(iter(values))))]
    table = np.full([len(axis) for axis in axes], np.nan)
    places = [{int(value): i for i, value in enumerate(axis)} for axis in axes]
    for key, value in values.items():
        table[tuple(place[part] for place, part in zip(places, key, strict=True))] = value
    for index in np.argwhere(
        np.isnan(table)
    ):  # large ones that were not run: as the roofline, proportionally
        spot = tuple(index)
        for axis in range(len(axes)):
            below = list(spot)
            below[axis] -= 1
            if below[axis] >= 0 and not np.isnan(table[tuple(below)]):
                ratio = axes[axis][spot[axis]] / axes[axis][below[axis]]
                table[spot] = table[tuple(below)] * ratio
                break
    return RegularGridInterpolator(
        [np.log(axis) for axis in axes], np.log(table), bounds_error=False, fill_value=None
    )


# Acceptance of a drafter's first choice by class: an assumption. No paper publishes these pairs' rates, and
# they are fitted to nothing, the papers' figures included.
def _quality(code: float, chat: float, summary: float, other: float) -> DraftQuality:
    return DraftQuality(rate={"code": code, "chat": chat, "summary": summary, "*": other})


GOOD = _quality(0.80, 0.68, 0.68, 0.70)
FAIR = _quality(0.74, 0.62, 0.62, 0.65)
LLAMA_DRAFTERS = {
    "68m": ("LLaMA-68M", _quality(0.50, 0.48, 0.46, 0.48)),
    "265m": ("LLaMA-265M", _quality(0.56, 0.54, 0.53, 0.54)),
    "616m": ("LLaMA-616M", _quality(0.62, 0.60, 0.59, 0.60)),
    "1.1b": ("LLaMA-1.1B", _quality(0.68, 0.66, 0.66, 0.66)),
    "1.4b": ("LLaMA-1.4B", _quality(0.70, 0.67, 0.67, 0.68)),
}


@dataclass(frozen=True)
class Cell:
    """A profile to write: name, accelerator, ranks, target, drafters by name, longest sequence."""

    name: str
    gpu: str
    ranks: int
    target: str
    drafters: dict[str, tuple[str, DraftQuality]]
    max_tokens: int
    collocated: bool = True


SMALL = {"1b": ("Llama-3.2-1B", GOOD)}
CELLS = [
    Cell("llama-70b-a100", "A100-80G", 4, "Llama-3.1-70B", SMALL, 32768),
    Cell("llama-70b-h100", "H100", 4, "Llama-3.1-70B", SMALL, 32768),
    Cell("llama-70b-h200", "H200", 2, "Llama-3.1-70B", SMALL, 32768),
    Cell("llama2-70b-a100", "A100-80G", 4, "Llama-2-70B", {"1.1b": ("LLaMA-1.1B", FAIR)}, 4096),
    Cell("qwen-32b-a100", "A100-80G", 2, "Qwen2.5-32B", {"0.5b": ("Qwen2.5-0.5B", FAIR)}, 32768),
    *(
        Cell(f"llama-8b-{gpu.lower()[:4]}", gpu, 1, "Llama-3.1-8B", {"1b": ("Llama-3.2-1B", GOOD)}, 32768)
        for gpu in ("A100-80G", "H100", "H200")
    ),
    *(
        Cell(f"llama2-7b-{gpu.lower()[:4]}", gpu, 1, "Llama-2-7B", {"68m": ("LLaMA-68M", FAIR)}, 4096)
        for gpu in ("A100-80G", "H100")
    ),
    Cell("qwen3-30b-a3b-h200", "H200", 1, "Qwen3-30B-A3B", {"0.6b": ("Qwen3-0.6B", GOOD)}, 32768),
    Cell("qwen3-235b-a22b-h200", "H200", 4, "Qwen3-235B-A22B", {"0.6b": ("Qwen3-0.6B", GOOD)}, 32768),
    Cell("mixtral-8x7b-h200", "H200", 1, "Mixtral-8x7B", {"265m": ("LLaMA-265M", FAIR)}, 32768),
    Cell("vicuna-33b-a100", "A100-80G", 4, "Vicuna-33B", {"68m": ("LLaMA-68M", FAIR)}, 2048),
    Cell("llama-7b-v100", "V100", 1, "Llama-2-7B", LLAMA_DRAFTERS, 2048, collocated=False),
    Cell("llama-13b-v100", "V100", 2, "Llama-2-13B", LLAMA_DRAFTERS, 2048, collocated=False),
    Cell("llama-30b-v100", "V100", 4, "LLaMA-30B", LLAMA_DRAFTERS, 2048, collocated=False),
]
VERSIONS = {"A100-80G": ("a100", "vllm0.14"), "H100": ("h100", "vllm0.24"), "H200": ("h200", "vllm0.24")}
SPLITWISE = {"A100-80G": "a100-80gb", "H100": "h100-80gb"}
# Share of memory for weights and cache.
MEMORY_SHARE = 0.9


def profile(cell: Cell, times: Times, note: str) -> HardwareProfile:
    """Fit a cell's models."""
    target, gpu = MODELS[cell.target], ACCELERATORS[cell.gpu]
    cost, error = fit(times, target, cell.ranks, cell.max_tokens)
    drafters = {}
    for name, (model, quality) in cell.drafters.items():
        drafter_cost, _ = fit(times, MODELS[model], 1, cell.max_tokens)
        drafters[name] = DrafterProfile(
            model=model, cost=drafter_cost, quality=quality, num_parameters=round(MODELS[model].parameters)
        )
    memory = MEMORY_SHARE * cell.ranks * gpu.memory - BYTES * target.parameters
    if cell.collocated:
        memory -= sum(BYTES * MODELS[d.model].parameters + 0.05 * gpu.memory for d in drafters.values())
    source = "roofline estimate from data sheets"
    if isinstance(times, TableTimes):
        prefix, version = VERSIONS[cell.gpu]
        source = f"fitted to sums of measured kernels: aiconfigurator, {prefix}, {version}"
        if target.experts:
            source += "; experts are a roofline estimate from data sheets"
    return HardwareProfile(
        name=cell.name,
        target=f"{cell.target}, tensor parallel {cell.ranks}",
        hardware=f"{cell.ranks}x {cell.gpu}",
        source=source,
        error=f"{error}{note}",
        cost=cost,
        num_slots=int(memory / target.kv_bytes),
        max_tokens=cell.max_tokens,
        drafters=drafters,
        collocated=cell.collocated,
        acceptance="chat",
    )


def main() -> None:
    """Fit every cell and write its profile."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "latency", type=Path, help="folder with aiconfigurator/ and splitwise_perf_model.csv.gz"
    )
    folder = parser.parse_args().latency
    times: dict[str, Times] = {"V100": RooflineTimes(ACCELERATORS["V100"])}
    notes = {"V100": "; not compared with measurements"}
    for gpu, (prefix, version) in VERSIONS.items():
        times[gpu] = TableTimes(Kernels(folder / "aiconfigurator", prefix, version), ACCELERATORS[gpu])
        if gpu in SPLITWISE:
            compared = against_splitwise(folder / "splitwise_perf_model.csv.gz", times[gpu], SPLITWISE[gpu])
            notes[gpu] = f"; Llama-2-70B TP4 by batch, sum against splitwise's whole decode step: {compared}"
    PROFILES.mkdir(exist_ok=True)
    for cell in CELLS:
        made = profile(cell, times[cell.gpu], notes.get(cell.gpu, ""))
        data = msgspec.json.format(msgspec.json.encode(rounded(made)), indent=2)
        (PROFILES / f"{cell.name}.json").write_bytes(data + b"\n")
        base, knee = made.baseline_s(), made.cost.knee(16)
        print(
            f"{cell.name}: {1e3 * base:.1f} ms a token alone, knee {knee} tokens, "
            f"{made.num_slots} slots; {made.error}"
        )


def rounded(made: HardwareProfile) -> object:
    """Four significant digits: more would pretend."""

    def cut(value: object) -> object:
        if isinstance(value, float):
            return float(f"{value:.4g}")
        if isinstance(value, dict):
            return {key: cut(held) for key, held in value.items()}
        return value

    return cut(msgspec.to_builtins(made))


if __name__ == "__main__":
    main()
