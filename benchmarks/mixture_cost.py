"""What forwards of a mixture of experts take by their rows, and how well the cost model says so.

python -m benchmarks.mixture_cost [--shape qwen3-30b] [--device cuda] [--runner hf] [--json FILE]

The weights are random and lie on the device only. Forwards are captured where they can be; if not, the record
says why. With `--quantization fp8` weights are rounded, experts' among them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec
import torch

from benchmarks.environment import describe
from benchmarks.forward_floor import Sizes, measured_rates
from cluster.linear_cost import StepPoint, experts_read
from cluster.profile_fit import fit_held_out
from engine.attention_kinds import AttentionKind
from engine.cuda_graphs import GraphedRunner
from engine.devices import resolve_device
from engine.hf_capturing import why_not_captured
from engine.hf_runner import HFRunner
from engine.llama_runner import LlamaRunner
from engine.llama_weights import load_llama_weights
from engine.quantization import Quantization
from engine.rounding import round_linears
from engine.runner import ModelRunner
from verifier.profile import measure_step_costs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Mixture:
    """A Qwen3-MoE model: its sizes with one expert in each layer, how many there are, and of a token's."""

    with_one: Sizes
    experts: int
    per_token: int

    @property
    def expert_weights(self) -> int:
        """Weights of all experts."""
        one = self.with_one
        return self.experts * one.layers * 3 * one.hidden * one.units

    @property
    def shared_weights(self) -> int:
        """Weights that every row is multiplied with: all but experts and the embedding."""
        one = self.with_one
        routers = one.layers * one.hidden * self.experts
        return one.multiplied - self.expert_weights // self.experts + routers


SHAPES = {
    "tiny": Mixture(Sizes(2, 64, 4, 2, 16, 32, 512), 8, 2),
    "small": Mixture(Sizes(4, 512, 8, 2, 64, 256, 4096), 64, 8),
    "qwen3-30b": Mixture(Sizes(48, 2048, 32, 4, 128, 768, 151936), 128, 8),  # Qwen3 30B-A3B
}
# Rows, requests and contexts that are timed.
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
REQUESTS = (1, 4, 16)
CONTEXTS = (32, 480)


def random_mixture(
    mixture: Mixture, dtype: torch.dtype, device: torch.device, max_tokens: int, experts: str | None
) -> PreTrainedModel:
    """A model of a shape with random weights, its experts computed in the way that `experts` names."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes = mixture.with_one
    config = Qwen3MoeConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.units,
        intermediate_size=sizes.units,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        num_experts=mixture.experts,
        num_experts_per_tok=mixture.per_token,
        norm_topk_prob=True,
        max_position_embeddings=max_tokens,
    )
    options = {} if experts is None else {"experts_implementation": experts}
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    return model.eval()


def run(
    shape: str,
    *,
    device: str = "auto",
    dtype: str = "bfloat16",
    attention: AttentionKind | None = None,
    runner: Literal["lean", "hf"] = "lean",
    experts: str | None = None,
    quantization: Quantization | None = None,
    repeats: int = 9,
) -> dict[str, Any]:
    """Time forwards and fit them, with what experts take and without.

    Args:
        shape: one of `SHAPES`.
        device, dtype, attention: where and in what it runs.
        runner: ours, or Transformers' forward.
        experts: of the latter, how experts are computed.
        quantization: what weights are rounded to.
        repeats: timings of each forward, of which the median counts.

    Raises:
        KeyError: if there is no such shape.
        DeviceUnavailable: if there is no such device.
    """
    sizes, where, kind = SHAPES[shape], resolve_device(device), getattr(torch, dtype)
    slots = max(REQUESTS) * max(CONTEXTS) + max(ROWS) + 8
    model = random_mixture(sizes, kind, where, max(CONTEXTS) + max(ROWS), experts)
    if quantization is not None:
        round_linears(model, quantization, keep=model.get_output_embeddings())
    inner: LlamaRunner | HFRunner
    obstacle = None
    if runner == "lean":
        inner = LlamaRunner(load_llama_weights(model), slots + 1, attention)
    else:
        inner = HFRunner(model, slots + 1, attention=attention)
        obstacle = why_not_captured(inner) if where.type == "cuda" else None
    del model
    if where.type != "cuda":
        obstacle = "only forwards of a GPU are"
    running: ModelRunner = inner if obstacle else GraphedRunner(inner)
    bandwidth, _ = measured_rates(where, kind, 5)
    measured = measure_step_costs(running, ROWS, CONTEXTS, repeats, request_counts=REQUESTS)
    points = [StepPoint(n, tokens, n * context, seconds) for n, tokens, context, seconds in measured]
    share = inner.shape.expert_share
    told, blind = fit_held_out(points, expert_share=share), fit_held_out(points)
    element: int = kind.itemsize

    def floor_s(num_rows: float) -> float:
        read = sizes.shared_weights + experts_read(num_rows, share) * sizes.expert_weights
        return element * read / bandwidth

    return {
        "shape": shape,
        "sizes": asdict(sizes),
        "device": str(where) if where.type == "cpu" else torch.cuda.get_device_name(where),
        "dtype": dtype,
        "attention": type(inner.attention).__name__,
        "runner": runner,
        "experts": experts,
        "quantization": quantization,
        "why_not_captured": obstacle,
        "bytes_per_second": bandwidth,
        "expert_share": share,
        "with_experts": msgspec.to_builtins({"cost": told.cost, "error": told.quality}),
        "without": msgspec.to_builtins({"cost": blind.cost, "error": blind.quality}),
        "forwards": [
            {
                "requests": point.num_requests,
                "rows": point.num_tokens,
                "context": point.num_context,
                "ms": 1e3 * point.seconds,
                "floor_ms": 1e3 * floor_s(point.num_tokens),
            }
            for point in points
        ],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the shape named on the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="small", choices=tuple(SHAPES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--attention", default=None, help="padded, triton or auto; by device if unset")
    parser.add_argument("--runner", default="lean", choices=("lean", "hf"))
    parser.add_argument("--experts", default=None, help="of hf: Transformers' name of a way")
    parser.add_argument("--quantization", default=None, choices=get_args(Quantization))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    arguments = parser.parse_args(argv)
    record = run(
        arguments.shape,
        device=arguments.device,
        dtype=arguments.dtype,
        attention=arguments.attention,
        runner=arguments.runner,
        experts=arguments.experts,
        quantization=arguments.quantization,
        repeats=arguments.repeats,
    )
    print(f"captured: {record['why_not_captured'] or 'yes'}")
    print(f"{'requests':>8}{'rows':>6}{'context':>9}{'ms':>9}{'of floor':>10}")
    for one in record["forwards"]:
        ratio = one["ms"] / one["floor_ms"]
        print(f"{one['requests']:8}{one['rows']:6}{one['context']:9}{one['ms']:9.2f}{ratio:10.2f}")
    for name in ("with_experts", "without"):
        error = record[name]["error"]
        print(f"fit {name.replace('_', ' ')}: median error {error['median']:.1%}, p90 {error['p90']:.1%}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"environment": describe(), **record}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
