"""Cost of EAGLE-3's layer beside a target: reading what a step keeps, and drafting, with random weights.

python -m benchmarks.eagle_cost --shape 8b --device cuda --dtype bfloat16 --json cost.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table

from benchmarks.environment import describe
from benchmarks.tables import console, progress
from engine.attention_kinds import make_attention
from engine.devices import resolve_device, synchronize
from engine.eagle import EagleLayer
from engine.eagle_weights import EagleWeights
from engine.linear import Linear
from engine.process import tune_process
from engine.runner import KeyTokens, ModelShape, Segment
from engine.sampling_params import RequestSpec, SamplingParams
from verifier.eagle_drafts import DRAFT_SLOTS, EagleDrafts
from verifier.proposing import Asking, Read
from verifier.request_state import RequestState

Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class Sizes:
    """Of a target and its EAGLE layer, which has an output projection of its own for `drafted` tokens."""

    hidden: int
    units: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    drafted: int


# Of published ones: Llama 3.1 8B's has 32,000 of the target's tokens. And of the demo family's.
SHAPES = {
    "8b": Sizes(4096, 14336, 32, 8, 128, 128_256, 32_000),
    "demo": Sizes(384, 512, 6, 2, 64, 4096, 4096),
}


class RandomTarget:
    """What the layer asks of its target (`FeatureRunner`), of random numbers."""

    feature_layers = (2, 4, 5)
    key_tokens = KeyTokens(0, 0)

    def __init__(
        self, sizes: Sizes, num_slots: int, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_slots, self.device = num_slots, device
        self.shape = ModelShape(sizes.vocab, max_tokens, 1, 0)
        self.hidden_scale = torch.ones(sizes.hidden, device=device)
        self._embedding = torch.randn(sizes.vocab, sizes.hidden, dtype=dtype, device=device)
        self._features = torch.randn(DRAFT_SLOTS, 3 * sizes.hidden, dtype=dtype, device=device)

    def forward(self, segments: Sequence[Segment], keep: Int32) -> torch.Tensor:
        """Nothing: the target is not measured."""
        return self._features[:0]

    def features(self, rows: Int32) -> torch.Tensor:
        """Some, whatever rows they are of."""
        return self._features[: len(rows)]

    def embed_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of random embeddings."""
        return self._embedding.index_select(0, tokens)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """By the embeddings, as of a tied target."""
        return hidden @ self._embedding.T


def random_weights(
    sizes: Sizes, max_tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[EagleWeights, int]:
    """The layer's weights, and bytes of those that one drafted layer reads."""

    def linear(outputs: int, inputs: int) -> Linear:
        return Linear(torch.randn(outputs, inputs, device=device).to(dtype) * inputs**-0.5)

    width = sizes.hidden
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    numbers = (
        2 * width * (queries + 2 * keys) + queries * width + 3 * width * sizes.units + width * sizes.drafted
    )
    angles = torch.arange(max_tokens)[:, None] * 10000.0 ** (
        -torch.arange(sizes.head_dim // 2) / (sizes.head_dim // 2)
    )
    weights = EagleWeights(
        combine=linear(width, 3 * width),
        feature_norm=None,
        qkv=linear(queries + 2 * keys, 2 * width),
        residual_scale=None,
        out=linear(width, queries),
        gate_up=linear(2 * sizes.units, width),
        down=linear(width, sizes.units),
        head=linear(sizes.drafted, width),
        output_scale=torch.ones(width, dtype=dtype, device=device),
        norm_output=False,
        embedding=None,
        token_of=torch.arange(sizes.drafted, device=device) if sizes.drafted < sizes.vocab else None,
        rotation=torch.polar(torch.ones_like(angles), angles)[:, None].to(device),
        eps=1e-5,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        hidden_size=width,
    )
    return weights, numbers * dtype.itemsize


@dataclass(frozen=True)
class Cost:
    """Medians for one shape.

    Attributes:
        requests, width, depth: drafted.
        read_ms: reading three rows of each request.
        draft_ms: drafting, with the wait for the beams.
        layer_ms: of it, each layer after the first.
        weights_gb_s: bytes of the weights of a layer over `layer_ms`.
    """

    requests: int
    width: int
    depth: int
    read_ms: float
    draft_ms: float
    layer_ms: float
    weights_gb_s: float


def measure(
    drafts: EagleDrafts, target: RandomTarget, requests: int, width: int, depth: int, context: int, calls: int
) -> tuple[float, float, float]:
    """Seconds of reading, of drafts of `depth` layers, and of drafts of one."""
    greedy = SamplingParams(temperature=0.0, max_tokens=1 << 20)
    spec = RequestSpec(request_id="r", tokens=[0], prompt_len=1, sampling=greedy)
    state = RequestState(spec, target.shape)
    lines = np.arange(requests * (context + 3), dtype=np.int32).reshape(requests, -1)
    rows = np.arange(3, dtype=np.int32)
    reads = [
        Read(str(i), rows + np.int32(3 * i), rows, rows + np.int32(context), line[-3:], line[:-3])
        for i, line in enumerate(lines)
    ]

    def asking(depth: int) -> list[Asking]:
        return [Asking(state, [0], 0, width, depth, place) for place in range(requests)]

    whole, first = asking(depth), asking(1)
    runs: list[Callable[[], object]] = [
        lambda: drafts.read(reads, is_asked=True),
        lambda: drafts.propose(whole)(),
        lambda: drafts.propose(first)(),
    ]
    seconds: list[list[float]] = [[] for _ in runs]
    for call in range(calls + 3):
        for run, times in zip(runs, seconds, strict=True):
            synchronize(drafts.device)
            start = time.perf_counter()
            run()
            synchronize(drafts.device)
            if call >= 3:
                times.append(time.perf_counter() - start)
    read, deep, shallow = map(median, seconds)
    return read, deep, shallow


def main(argv: Sequence[str] | None = None) -> None:
    """Run the grid, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="demo")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--width", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--context", type=int, default=512, help="tokens of each request")
    parser.add_argument(
        "--graphs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="replay captured layers on a GPU",
    )
    parser.add_argument("--calls", type=int, default=20, help="calls measured per shape")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args(argv)
    tune_process()
    torch.manual_seed(0)
    sizes, device, dtype = SHAPES[args.shape], resolve_device(args.device), getattr(torch, args.dtype)
    max_tokens = args.context + 3 + args.depth
    num_slots = max(args.requests) * (args.context + 3)
    target = RandomTarget(sizes, num_slots, max_tokens, dtype, device)
    weights, layer_bytes = random_weights(sizes, max_tokens, dtype, device)
    attention = make_attention(None, num_slots + DRAFT_SLOTS, dtype=dtype, device=device)
    drafts = EagleDrafts(EagleLayer(weights, target, attention), target, max_tokens, graphs=args.graphs)
    costs = []
    with progress() as bar:
        task = bar.add_task("drafts", total=len(args.requests) * len(args.width))
        for requests in args.requests:
            for width in args.width:
                read, deep, shallow = measure(
                    drafts, target, requests, width, args.depth, args.context, args.calls
                )
                layer = (deep - shallow) / (args.depth - 1)
                costs.append(
                    Cost(
                        requests,
                        width,
                        args.depth,
                        read_ms=1e3 * read,
                        draft_ms=1e3 * deep,
                        layer_ms=1e3 * layer,
                        weights_gb_s=layer_bytes / layer / 1e9,
                    )
                )
                bar.advance(task)
    table = Table(title=f"EAGLE-3, shape {args.shape}: {layer_bytes / 1e6:.1f} MB a layer (medians)")
    for column in ("requests", "width", "depth", "read ms", "draft ms", "ms a layer", "weights GB/s"):
        table.add_column(column, justify="right")
    for cost in costs:
        numbers = (
            f"{value:.3g}" if isinstance(value, float) else str(value) for value in asdict(cost).values()
        )
        table.add_row(*numbers)
    console.print(table)
    if args.json is not None:
        figures = {
            "environment": describe(),
            "shape": asdict(sizes),
            "graphs": args.graphs,
            "costs": [asdict(cost) for cost in costs],
        }
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
