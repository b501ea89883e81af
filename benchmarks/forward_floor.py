"""Forwards of a model's shape with random weights, beside what memory and arithmetic of the device allow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.forward_cost import batch
from benchmarks.kernel_times import kernel_times
from engine.attention_kinds import AttentionKind
from engine.capturable import CapturableRunner
from engine.cuda_graphs import GraphedRunner
from engine.devices import memory_of, resolve_device, seconds_of, synchronize
from engine.experts import AnyLinear, FeedForward
from engine.linear import Linear
from engine.llama_runner import LlamaRunner
from engine.llama_weights import LlamaLayer, LlamaWeights
from engine.quantization import Quantization
from engine.quantized_linear import make_linear
from engine.rounding import rounded
from engine.runner import ModelRunner, Segment
from engine.runner_options import RunnerKind
from engine.triton_support import runs_triton

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a Llama-shaped model; `tied` if embedding and output projection are one tensor when stored."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    units: int
    vocab: int
    tied: bool = False

    @property
    def multiplied(self) -> int:
        """Weights that every forward multiplies with: all but the embedding."""
        each = (
            self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads) + 3 * self.hidden * self.units
        )
        return self.layers * each + self.hidden * self.vocab

    def weight_bytes(self, element: int, quantization: Quantization | None = None) -> int:
        """Bytes of weights that a forward reads, of `element` each, or quantized but for the last product."""
        if quantization is None:
            return self.multiplied * element
        head = self.hidden * self.vocab
        return round((self.multiplied - head) * _BYTES[quantization]) + head * element

    @property
    def kv_numbers(self) -> int:
        """Numbers of KV per token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


SHAPES = {
    "tiny": Sizes(2, 64, 4, 2, 16, 128, 512),
    "135m": Sizes(30, 576, 9, 3, 64, 1536, 49152, tied=True),  # SmolLM2 135M
    "1b": Sizes(16, 2048, 32, 8, 64, 8192, 128256, tied=True),  # Llama 3.2 1B
    "8b": Sizes(32, 4096, 32, 8, 128, 14336, 128256),  # Llama 3.1 8B
    "32b": Sizes(64, 5120, 64, 8, 128, 25600, 151936),  # Qwen3 32B
    "70b": Sizes(80, 8192, 64, 8, 128, 28672, 128256),  # Llama 3.1 70B
}
#: Requests and rows of each: decoding alone and in batches, and verification of trees.
CASES = ((1, 1), (1, 8), (8, 1), (8, 8), (64, 1), (64, 4))

_PRINTED_KERNELS = 12
# Of a weight: of one with four bits also a 128th of its scale, of four bytes, and of its zero point, of one.
_BYTES: dict[Quantization, float] = {"fp8": 1, "int4": 0.5 + 5 / 128}


def random_weights(
    sizes: Sizes,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int,
    quantization: Quantization | None = None,
) -> LlamaWeights:
    """Weights of a shape that keep activations near one; what they compute means nothing."""
    generator = torch.Generator(device=device).manual_seed(0)

    def floats(outputs: int, inputs: int) -> torch.Tensor:
        weight = torch.empty(outputs, inputs, dtype=dtype, device=device)
        return weight.normal_(0, inputs**-0.5, generator=generator)

    def linear(outputs: int, inputs: int) -> AnyLinear:
        weight = floats(outputs, inputs)
        return make_linear(weight if quantization is None else rounded(weight, quantization), dtype=dtype)

    query, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    angles = torch.outer(
        torch.arange(max_tokens, device=device),
        500_000.0 ** -(torch.arange(0, sizes.head_dim, 2, device=device) / sizes.head_dim),
    )
    embedding = torch.empty(sizes.vocab, sizes.hidden, dtype=dtype, device=device)
    return LlamaWeights(
        layers=[
            LlamaLayer(
                qkv=linear(query + 2 * keys, sizes.hidden),
                out=linear(sizes.hidden, query),
                mlp=FeedForward(
                    gate_up=linear(2 * sizes.units, sizes.hidden), down=linear(sizes.hidden, sizes.units)
                ),
                head_norms=None,
            )
            for _ in range(sizes.layers)
        ],
        embedding=embedding.normal_(0, 1, generator=generator),
        head=Linear(floats(sizes.vocab, sizes.hidden)),
        head_scale=torch.ones(sizes.hidden, device=device),
        rotation=torch.polar(torch.ones_like(angles), angles).unsqueeze(1),
        norm_floor=None,
        eps=1e-5,
        scale=sizes.head_dim**-0.5,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab,
        max_tokens=max_tokens,
        dtype=dtype,
        device=device,
    )


def transformers_config(sizes: Sizes, max_tokens: int, **fields: Any) -> LlamaConfig:
    """Transformers' description of a shape; `fields` are further ones of it."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.units,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=sizes.tied,
        **fields,
    )


def random_transformers_model(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, max_tokens: int
) -> PreTrainedModel:
    """A Transformers model of a shape, with random weights made on the device."""
    from transformers import AutoModelForCausalLM

    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            transformers_config(sizes, max_tokens), dtype=dtype
        )
    return model.eval()


def measured_rates(device: torch.device, dtype: torch.dtype, repeats: int = 7) -> tuple[float, float]:
    """Bytes per second of a copy, read and written ones counted; operations per second of a large product."""
    on_gpu = device.type == "cuda"
    source = torch.ones((1 << 30) if on_gpu else (64 << 20), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    side = 8192 if on_gpu else 512
    generator = torch.Generator(device=device).manual_seed(0)
    left, right = (
        torch.randn(side, side, generator=generator, device=device, dtype=torch.float32).to(dtype)
        for _ in range(2)
    )
    copied = _median(lambda: target.copy_(source), device, repeats)
    multiplied = _median(lambda: left @ right, device, repeats)
    return 2 * source.numel() / copied, 2 * side**3 / multiplied


def floors(
    sizes: Sizes,
    weight_bytes: int,
    element: int,
    requests: int,
    rows: int,
    context: int,
    bandwidth: float,
    operations: float,
    prompt: int = 0,
) -> tuple[float, float]:
    """Least seconds of a forward: for reading weights and KV once, and for multiplying."""
    read = weight_bytes + (requests * (context + rows) + prompt) * sizes.kv_numbers * element
    return read / bandwidth, 2 * sizes.multiplied * (requests * rows + prompt) / operations


def _prompt(rows: int, slots: int) -> list[Segment]:
    """A request that reads so many tokens, none if 0, in the last of the slots."""
    if rows == 0:
        return []
    numbers = np.arange(rows, dtype=np.int32)
    return [Segment(numbers, numbers, numbers + np.int32(slots - rows), numbers[:0])]


def run(
    shape: str,
    *,
    runner: RunnerKind = "lean",
    device: str = "auto",
    dtype: str = "bfloat16",
    attention: AttentionKind | None = None,
    context: int = 1024,
    repeats: int = 21,
    cases: Sequence[tuple[int, int]] = CASES,
    quantization: Quantization | None = None,
    kernels: bool = False,
    prompt: int = 0,
) -> dict[str, Any]:
    """Time forwards of a shape, ordinary and captured in turns, and give each its floor.

    With `runner` "hf" it is a Transformers model, and the lean runner's captured forwards take turns with it.
    With `quantization` the layers' weights have eight or four bits, and arithmetic is still that of `dtype`.
    With `prompt` one more request reads so many tokens of a prompt in each case.
    With `kernels` each case also has those of a captured forward, profiled after it was timed.
    On a CPU nothing can be captured: there the second way only pads, which shows what padding costs.

    Raises:
        KeyError: if there is no such shape.
        DeviceUnavailable: if there is no such device.
        ValueError: if no case fits in its memory, or a Transformers model is to be quantized or cannot be
            captured.
    """
    if runner == "hf" and quantization is not None:
        raise ValueError("`quantization` is for the lean runner")
    sizes, where = SHAPES[shape], resolve_device(device)
    kind: torch.dtype = getattr(torch, dtype)
    max_tokens = max(context + max(rows for _, rows in cases), prompt)
    bandwidth, operations = measured_rates(where, kind, min(repeats, 7))
    weights = random_weights(sizes, kind, where, max_tokens, quantization)
    # Where no kernel takes quantized weights they are widened.
    weight_bytes = sizes.weight_bytes(kind.itemsize, quantization if runs_triton(where) else None)
    model = random_transformers_model(sizes, kind, where, max_tokens) if runner == "hf" else None
    if where.type == "cuda":
        ways = 2 if model is None else 3
        cases = fitting_cases(cases, context, sizes.kv_numbers * kind.itemsize, memory_of(where).free, ways)
    slots = max(requests * (context + rows) for requests, rows in cases) + prompt + 8
    lean = GraphedRunner(LlamaRunner(weights, slots + 1, attention))
    runners: dict[str, ModelRunner]
    if model is None:
        ordinary: CapturableRunner = LlamaRunner(weights, slots, attention)
        captured = lean
        runners = {"ordinary": ordinary, "captured": captured}
    else:
        ordinary, captured = _of_transformers(model, slots, attention)
        runners = {"ordinary": ordinary, "captured": captured, "lean": lean}
    results = []
    for requests, rows in cases:
        segments = [*batch(requests, rows, context, sizes.vocab, slots - prompt), *_prompt(prompt, slots)]
        # Of a prompt only the last row is wanted.
        keep = np.arange(requests * rows + bool(prompt), dtype=np.int32)
        keep[requests * rows :] += prompt - 1
        for one in dict.fromkeys((captured, lean)):
            one.capture(segments)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
        for repeat in range(repeats + 3):  # the first ones build kernels
            for name, way in runners.items():
                seconds = seconds_of(partial(way.forward, segments, keep), where)
                if repeat >= 3:
                    times[name].append(seconds)
        memory, arithmetic = floors(
            sizes, weight_bytes, kind.itemsize, requests, rows, context, bandwidth, operations, prompt
        )
        floor = max(memory, arithmetic)
        result: dict[str, Any] = {
            "requests": requests,
            "rows": rows,
            "floor_ms": floor * 1e3,
            "bound_by": "memory" if memory >= arithmetic else "arithmetic",
        }
        for name, found in times.items():
            wall = statistics.median(seconds for seconds, _ in found)
            result[name] = {
                "ms": wall * 1e3,
                "device_ms": statistics.median(seconds for _, seconds in found) * 1e3,
                "of_floor": wall / floor,
                "host_ms": _host_seconds(partial(runners[name].forward, segments, keep), where, repeats)
                * 1e3,
            }
        if kernels:
            result["kernels"] = [
                asdict(one) for one in kernel_times(partial(captured.forward, segments, keep), where)
            ]
        results.append(result)
    return {
        "shape": shape,
        "runner": runner,
        "sizes": asdict(sizes),
        "weight_bytes": weight_bytes,
        "device": str(where) if where.type == "cpu" else torch.cuda.get_device_name(where),
        "dtype": dtype,
        "quantization": quantization,
        "attention": type(ordinary.attention).__name__,
        "context": context,
        "prompt": prompt,
        "bytes_per_second": bandwidth,
        "operations_per_second": operations,
        "results": results,
    }


def _of_transformers(
    model: PreTrainedModel, slots: int, attention: AttentionKind | None
) -> tuple[CapturableRunner, GraphedRunner]:
    """Two runners of one Transformers model: of its forwards as they are, and captured."""
    from engine.hf_capturing import why_not_captured
    from engine.hf_runner import HFRunner

    ordinary, inner = (HFRunner(model, number, attention=attention) for number in (slots, slots + 1))
    obstacle = why_not_captured(inner) if inner.device.type == "cuda" else None
    if obstacle is not None:
        raise ValueError(f"forwards of the Transformers model cannot be captured: {obstacle}")
    return ordinary, GraphedRunner(inner)


def fitting_cases(
    cases: Sequence[tuple[int, int]], context: int, kv_bytes: int, free: int, ways: int = 2
) -> list[tuple[int, int]]:
    """The cases whose keys and values fit once for each of so many ways of running, beside activations."""
    kept = [one for one in cases if ways * one[0] * (context + one[1]) * kv_bytes < 0.85 * free]
    if not kept:
        raise ValueError(
            f"{free / 1e9:.1f} GB are free beside the weights: too little for a context of {context}"
        )
    return kept


def table(record: dict[str, Any]) -> str:
    """The record for people."""
    lines = [
        f"{record['shape']}{_by(record['runner'])}, {record['dtype']}{_with(record['quantization'])}, "
        f"{record['attention']}, context {record['context']}{_beside(record['prompt'])}, "
        f"on {record['device']}: "
        f"{record['weight_bytes'] / 1e9:.2f} GB of weights, "
        f"{record['bytes_per_second'] / 1e9:.0f} GB/s, {record['operations_per_second'] / 1e12:.2f} TFLOP/s",
        f"{'requests':>8}{'rows':>6}{'floor ms':>10}  {'bound by':<11}{'ordinary ms':>12}{'captured ms':>12}"
        f"{'x floor':>9}{'ordinary/captured':>19}{'host ms':>9}"
        + (f"{'lean ms':>9}" if "lean" in record["results"][0] else ""),
    ]
    for one in record["results"]:
        ordinary, captured = one["ordinary"], one["captured"]
        lines.append(
            f"{one['requests']:8}{one['rows']:6}{one['floor_ms']:10.3f}  {one['bound_by']:<11}"
            f"{ordinary['ms']:12.3f}{captured['ms']:12.3f}{captured['of_floor']:9.2f}"
            f"{ordinary['ms'] / captured['ms']:19.2f}{captured['host_ms']:9.3f}"
            + (f"{one['lean']['ms']:9.3f}" if "lean" in one else "")
        )
    for one in record["results"]:
        if "kernels" in one:
            lines += ["", f"{one['requests']} requests, {one['rows']} rows each, captured:"]
            lines += [
                f"{kernel['us']:10.1f} us {kernel['launches']:6.0f} x  {kernel['name'][:70]}"
                for kernel in one["kernels"][:_PRINTED_KERNELS]
            ]
    return "\n".join(lines)


def _host_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Until a call returns, whose results the device may not have yet."""
    found = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _beside(prompt: int) -> str:
    return f", beside a prompt of {prompt}" if prompt else ""


def _by(runner: str) -> str:
    return "" if runner == "lean" else " by Transformers"


def _with(quantization: str | None) -> str:
    return "" if quantization is None else f" with {quantization} weights"


def _median(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    for _ in range(3):
        work()
    return statistics.median(seconds_of(work, device)[1] for _ in range(repeats))
