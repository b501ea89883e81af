"""What drafters of eight and of four bits cost in accepted tokens; needs no GPU, which only makes it faster.

python -m benchmarks.drafter_rounding [--prompts 60] [--tokens 96] [--rounds 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
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
from zoo.registry import load_prompts, spread
from zoo.tokenizer import load as load_tokenizer

#: The demo's model drafters, and the domain of the held-out prompts that each is asked; None for all.
DRAFTERS = {"general-2x192": None, "code-2x128": "code", "chat-2x128": "chat", "summary-1x128": "summary"}

#: As they are, and rounded, by `quantization`.
KINDS = ("float", "fp8", "int4")


def measure(drafter: str, domain: str | None, *, prompts: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens per step with a drafter as it is and rounded, in turns; greedy, always as deep."""
    raw = demo_config().model_dump()
    raw["policy"]["name"] = "fixed"
    # In a burst short answers end before the drafter has read their prompts, and their steps have no drafts.
    raw["scheduler"]["max_running"] = 1
    raw["drafters"] = [one for one in raw["drafters"] if one["name"] == drafter]
    tokenizer = load_tokenizer(model_directory(raw["target"]["path"]))
    asked = [prompt_ids(tokenizer, prompt) for prompt in spread(load_prompts(domain), prompts)]
    # What a target writes after the end of its answer nobody asks for, and drafters are no measure of it.
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, stop_token_ids=(tokenizer.eos_token_id,))
    requests = [Submit(request_id=str(i), prompt=prompt, sampling=sampling) for i, prompt in enumerate(asked)]
    found: dict[str, list[float]] = {name: [] for name in KINDS}
    answers: dict[str, list[list[int]]] = {}
    for number in range(rounds):
        for name in sorted(found, reverse=bool(number % 2)):
            raw["drafters"][0]["quantization"] = None if name == "float" else name
            done = LocalEngine(FlotillaConfig.model_validate(raw)).generate(requests)
            each = [done[request.request_id] for request in requests]
            steps = sum(answer.receipt.num_steps for answer in each if answer.receipt)
            found[name].append(sum(len(answer.tokens) for answer in each) / steps)
            answers[name] = [answer.tokens for answer in each]
    identical = sum(all(one == each[0] for one in each) for each in zip(*answers.values(), strict=True))
    return {"drafter": drafter, "prompts": len(asked), "identical": identical, **found}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all drafters, print and save; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=60, help="held-out prompts per drafter (default 60)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer, at most (default 96)")
    parser.add_argument("--rounds", type=int, default=1, help="of all in turns, which agree (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    options = parser.parse_args(argv)
    results = [
        measure(drafter, domain, prompts=options.prompts, tokens=options.tokens, rounds=options.rounds)
        for drafter, domain in DRAFTERS.items()
    ]
    rows = [
        [
            one["drafter"],
            *(tables.number(median(one[name]), 2) for name in KINDS),
            *(f"{min(one[name]):.2f} to {max(one[name]):.2f}" for name in KINDS),
            f"{one['identical']} of {one['prompts']}",
        ]
        for one in results
    ]
    heads = [
        "drafter",
        "tokens per step",
        "in eight bits",
        "in four",
        *["rounds"] * len(KINDS),
        "outputs identical",
    ]
    tables.console.print(tables.plain_table("", heads, rows))
    tables.write_json(
        options.json, {"benchmark": "drafter_rounding", "environment": describe(), "results": results}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
