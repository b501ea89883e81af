"""What LoRA adapters cost a forward: loaded and not asked for, one for all rows, another for each request.

python -m benchmarks.adapter_cost MODEL_DIR [--adapters 4] [--rank 16] [--json FILE]

Adapters have random weights beside all linear layers of attention and feed-forward: what is computed does
not depend on them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.environment import describe
from benchmarks.forward_cost import GRID, batch, in_turns
from benchmarks.tables import console
from engine.adapter_files import Adapter, LowRank
from engine.llama_runner import LlamaRunner
from engine.llama_weights import load_llama_weights
from engine.process import tune_process
from engine.runner import ModelRunner, Segment

PLAIN, UNASKED, ONE, EACH = "no adapters", "loaded, not asked for", "one for all", "one for each"
_SLOTS = 32768


def random_adapter(model: PreTrainedModel, name: str, rank: int, seed: int) -> Adapter:
    """Of all linear layers but the output projection."""
    generator = torch.Generator().manual_seed(seed)
    modules = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            outputs, inputs = module.weight.shape
            down, up = (
                torch.randn(shape, generator=generator) for shape in ((rank, inputs), (outputs, rank))
            )
            modules[path] = LowRank(down / inputs, up / rank)
    return Adapter(name, Path(), modules)


def measure(
    plain: LlamaRunner,
    adapted: LlamaRunner,
    num_adapters: int,
    *,
    context: int,
    repeats: int,
    grid: Sequence[tuple[int, int]] = GRID,
) -> list[dict[str, Any]]:
    """Median milliseconds of processor time per forward, one row per grid point, in turns."""
    results = []
    for requests, rows in grid:
        segments = batch(requests, rows, context, plain.shape.vocab_size, plain.num_slots)

        def with_adapters(numbers: Sequence[int], segments: list[Segment] = segments) -> list[Segment]:
            return [
                msgspec.structs.replace(segment, adapter=numbers[index % len(numbers)])
                for index, segment in enumerate(segments)
            ]

        ways: dict[str, tuple[ModelRunner, list[Segment]]] = {
            PLAIN: (plain, segments),
            UNASKED: (adapted, segments),
            ONE: (adapted, with_adapters([1])),
            EACH: (adapted, with_adapters(range(1, num_adapters + 1))),
        }
        results.append({"requests": requests, "rows": rows, "ms": in_turns(ways, repeats)})
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the model directory named on the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="model directory, of the Llama family")
    parser.add_argument("--adapters", type=int, default=4, help="how many are loaded (default 4)")
    parser.add_argument("--rank", type=int, default=16, help="of each (default 16)")
    parser.add_argument("--context", type=int, default=256, help="tokens before the rows (default 256)")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    tune_process()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    adapters = [random_adapter(model, f"a{n}", options.rank, n) for n in range(options.adapters)]
    plain, adapted = (
        LlamaRunner(load_llama_weights(model, adapters=some), _SLOTS) for some in ((), adapters)
    )
    results = measure(plain, adapted, len(adapters), context=options.context, repeats=options.repeats)
    table = Table("requests", "rows each", "ms without", UNASKED, ONE, EACH, title="times of a forward")
    for one in results:
        without = one["ms"][PLAIN]
        ratios = [f"{one['ms'][name] / without:.2f}x" for name in (UNASKED, ONE, EACH)]
        table.add_row(str(one["requests"]), str(one["rows"]), f"{without:.2f}", *ratios)
    console.print(table)
    if options.json:
        settings = {name: getattr(options, name) for name in ("adapters", "rank", "context", "repeats")}
        record = {"environment": describe(), "model": options.model.name, **settings, "results": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
