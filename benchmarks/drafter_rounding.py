"""What rounding drafters to eight bits costs in accepted tokens; needs no GPU, which only makes it faster.

python -m benchmarks.drafter_rounding [--prompts 60] [--tokens 96] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.environment import describe
from cluster.config import FlotillaConfig
from cluster.local import LocalEngine
from cluster.model_paths import model_directory
from cluster.stream_messages import Submit
from deployments.demo import demo_config
from engine.sampling_params import SamplingParams
from zoo.agreement import prompt_ids
from zoo.registry import load_prompts
from zoo.tokenizer import load as load_tokenizer

#: The demo's model drafters, and the domain of the held-out prompts that each is asked; None for all.
DRAFTERS = {"general-2x192": None, "code-2x128": "code", "chat-2x128": "chat", "summary-1x128": "summary"}


def measure(drafter: str, domain: str | None, *, prompts: int, tokens: int) -> dict[str, Any]:
    """Tokens per step with a drafter as it is and rounded, greedy, always so deep (policy `fixed`)."""
    raw = demo_config().model_dump()
    raw["policy"]["name"] = "fixed"
    raw["drafters"] = [one for one in raw["drafters"] if one["name"] == drafter]
    tokenizer = load_tokenizer(model_directory(raw["target"]["path"]))
    asked = [prompt_ids(tokenizer, prompt) for prompt in load_prompts(domain)[:prompts]]
    found: dict[str, Any] = {"drafter": drafter, "prompts": len(asked)}
    outputs = []
    for name, quantization in (("float", None), ("fp8", "fp8")):
        raw["drafters"][0]["quantization"] = quantization
        engine = LocalEngine(FlotillaConfig.model_validate(raw))
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
        done = engine.generate(
            [Submit(request_id=str(i), prompt=prompt, sampling=sampling) for i, prompt in enumerate(asked)]
        )
        answers = [done[str(i)] for i in range(len(asked))]
        steps = sum(answer.receipt.num_steps for answer in answers if answer.receipt)
        found[name] = sum(len(answer.tokens) for answer in answers) / steps
        outputs.append([answer.tokens for answer in answers])
    found["identical"] = sum(one == other for one, other in zip(*outputs, strict=True))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all drafters, print and save; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=60, help="held-out prompts per drafter (default 60)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer, at most (default 96)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    options = parser.parse_args(argv)
    results = [
        measure(drafter, domain, prompts=options.prompts, tokens=options.tokens)
        for drafter, domain in DRAFTERS.items()
    ]
    rows = [
        [
            one["drafter"],
            tables.number(one["float"], 3),
            tables.number(one["fp8"], 3),
            tables.number(one["fp8"] / one["float"], 3),
            f"{one['identical']} of {one['prompts']}",
        ]
        for one in results
    ]
    heads = ["drafter", "tokens per step", "in eight bits", "ratio", "outputs identical"]
    tables.console.print(tables.plain_table("", heads, rows))
    tables.write_json(
        options.json, {"benchmark": "drafter_rounding", "environment": describe(), "results": results}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
