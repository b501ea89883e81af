"""Cost of a draft call by requests, depth and width, and how much of it is not the model's forward.

python -m benchmarks.draft_cost --path zoo/weights/drafter-code-2x128 --json cost.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.environment import describe
from benchmarks.tables import console, progress
from drafters.factory import build_drafter
from drafters.messages import DraftCall, DraftItem, DraftPlan, DraftResult
from drafters.protocol import Drafter
from engine.sampling_params import RequestSpec, SamplingParams
from engine.stop_rules import EstimateRule

# Beside it no layer is dear, so that nothing but the objective ends a draft.
_WHOLE_STEP_S = 1e9
#: Who grows trees: whether the device, whether by captured layers, and whether forwards are captured at all.
TREES = {
    "host": (False, False, True),
    "laid-out": (True, False, True),
    "device": (True, True, True),
    "ordinary": (True, False, False),
}


@dataclass(frozen=True)
class Shape:
    """One cell of the grid."""

    requests: int
    depth: int
    width: int
    sampled: bool


@dataclass(frozen=True)
class Cost:
    """Medians over the calls of one shape.

    Attributes:
        shape: what was drafted.
        forwards: of a call, the catch-up included.
        call_ms: one draft call, catching up included.
        forward_ms: part of it in model forwards; on a device that grows the trees, from the first launch to
            having all results.
        overhead_ms_per_forward: the rest, per forward (the catch-up or a layer): top k, beam, slots.
        overhead_share: the rest, as a share of the call.
    """

    shape: Shape
    forwards: float
    call_ms: float
    forward_ms: float
    overhead_ms_per_forward: float
    overhead_share: float


def main(argv: Sequence[str] | None = None) -> None:
    """Run the grid, print a table, write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", type=Path, help="drafter's Hugging Face directory; default random, 2x128")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--trees",
        choices=("auto", *TREES),
        default="auto",
        help="where they are grown: laid-out is by the device, layer by layer; ordinary captures nothing",
    )
    parser.add_argument("--runner", choices=("auto", "hf", "lean"), default="auto")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--depth", type=int, nargs="+", default=[4])
    parser.add_argument("--width", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--context", type=int, default=256, help="prompt length in tokens")
    parser.add_argument("--calls", type=int, default=40, help="calls measured per shape")
    parser.add_argument("--used", type=int, help="layers after which a rule ends drafts; default all")
    parser.add_argument("--sampled", action="store_true", help="also measure sampling requests")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        path = args.path
        if path is None:
            path = Path(directory)
            _random_drafter(path, max_tokens=args.context + 8 * args.calls + 64)
        on_device, layer_graphs, graphs = TREES.get(args.trees, (None, True, True))
        drafter = build_drafter(
            "model",
            path=str(path),
            dtype=args.dtype,
            runner=args.runner,
            device=args.device,
            on_device=on_device,
            layer_graphs=layer_graphs,
            graphs=graphs,
            num_slots=max(args.requests) * (args.context + 8 * args.calls + 512),
        )
        shapes = [
            Shape(requests, depth, width, sampled)
            for sampled in ([False, True] if args.sampled else [False])
            for requests in args.requests
            for depth in args.depth
            for width in args.width
        ]
        with progress() as bar:
            task = bar.add_task("draft calls", total=len(shapes))
            costs = []
            for shape in shapes:
                costs.append(measure(drafter, shape, args.context, args.calls, args.used))
                bar.advance(task)
    _print(costs)
    if args.json is not None:
        figures = {"environment": describe(), "costs": [asdict(cost) for cost in costs]}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(drafter: Drafter, shape: Shape, context: int, calls: int, used: int | None = None) -> Cost:
    """Draft `calls` times as in decoding: each time half of the best path and one other token come back.

    After `used` layers a rule finds that another one does not pay, whatever its tokens are.
    """
    rule = None
    if used is not None:
        rule = EstimateRule(
            num_requests=shape.requests,
            base_s=_WHOLE_STEP_S,
            first_layer_s=1.0,
            layer_s=1.0,
            token_s=0.0,
            mean_confidence=1.0,
            tpot_s=_WHOLE_STEP_S + used + 0.5,
        )
    rng = np.random.default_rng(0)
    plan = DraftPlan(shape.depth, shape.width)
    vocab = drafter.capabilities.vocab_size
    items = []
    for request in range(shape.requests):
        spec = RequestSpec(
            request_id=str(request),
            tokens=rng.integers(0, vocab, context).tolist(),
            prompt_len=context,
            sampling=SamplingParams(
                temperature=1.0 if shape.sampled else 0.0, seed=request, max_tokens=1_000_000
            ),
        )
        empty = np.zeros(0, dtype=np.int32)
        items.append(DraftItem(request_id=str(request), start=0, tokens=empty, plan=plan, spec=spec))
    heard = dict.fromkeys(map(str, range(shape.requests)), context)
    measured: list[DraftResult] = []
    for _ in range(calls + 5):
        result = drafter.draft(DraftCall(call_id=0, items=items, stop_rule=rule))
        measured.append(result)
        items = []
        for draft in result.drafts:
            node = 0
            tokens: list[int] = []
            while len(children := draft.tree.children(node)) and len(tokens) < shape.depth // 2:
                node = int(children[0])
                tokens.append(int(draft.tree.token[node]))
            new = np.array([*tokens, rng.integers(vocab)], dtype=np.int32)
            start = heard[draft.request_id]
            items.append(DraftItem(request_id=draft.request_id, start=start, tokens=new, plan=plan))
            heard[draft.request_id] = start + len(new)
    drafter.draft(DraftCall(call_id=0, items=[], release=list(heard)))
    measured = measured[5:]
    overhead = [(r.seconds - r.forward_seconds) / r.num_forwards for r in measured if r.num_forwards]
    share = [1 - r.forward_seconds / r.seconds for r in measured]
    return Cost(
        shape=shape,
        forwards=median(r.num_forwards for r in measured),
        call_ms=1e3 * median(r.seconds for r in measured),
        forward_ms=1e3 * median(r.forward_seconds for r in measured),
        overhead_ms_per_forward=1e3 * median(overhead),
        overhead_share=median(share),
    )


def _random_drafter(path: Path, max_tokens: int) -> None:
    """A random Llama of the embedded drafters' size."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(str(path))


def _print(costs: Sequence[Cost]) -> None:
    table = Table(title="Cost of a draft call (medians)")
    for column in (
        "requests",
        "depth",
        "width",
        "sampled",
        "forwards",
        "call ms",
        "forward ms",
        "overhead ms/forward",
        "share",
    ):
        table.add_column(column, justify="right")
    for cost in costs:
        shape = cost.shape
        table.add_row(
            str(shape.requests),
            str(shape.depth),
            str(shape.width),
            "yes" if shape.sampled else "no",
            f"{cost.forwards:g}",
            f"{cost.call_ms:.2f}",
            f"{cost.forward_ms:.2f}",
            f"{cost.overhead_ms_per_forward:.3f}",
            f"{cost.overhead_share:.0%}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
