"""What each kind of drafter gets accepted, and costs, on answers that are known: nothing is verified.

Greedy verification accepts a draft as far as it agrees with the target's own answer, so a replay against that
answer gives each drafter's accepted tokens exactly, without the target's time.

    python -m benchmarks.draft_replay --prompts 60 --json replay.json
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.environment import describe
from cluster.drafter_config import (
    DrafterConfig,
    ModelDrafterConfig,
    PromptLookupConfig,
    SuffixAutomatonConfig,
)
from cluster.pool_drafter import build_pool_drafter
from drafters.messages import DraftCall, DraftItem, DraftPlan
from drafters.protocol import Drafter
from engine.sampling_params import RequestSpec, SamplingParams
from engine.tree import TokenTree
from zoo import agreement, models
from zoo.registry import DOMAINS, DRAFTERS, OTHER_VOCABULARY, TARGET, load_prompts, weights_dir
from zoo.tokenizer import load as load_tokenizer

CONFIGS: dict[str, DrafterConfig] = {
    **{
        name: ModelDrafterConfig(name=name, path=f"zoo:{name}", num_slots=4096)
        for name in (*DRAFTERS, *OTHER_VOCABULARY)
    },
    "prompt-lookup": PromptLookupConfig(),
    "suffix, own request": SuffixAutomatonConfig(scope="request"),
    "suffix, all requests": SuffixAutomatonConfig(),
}


def accepted(tree: TokenTree, answer: list[int]) -> int:
    """How many tokens of the answer's beginning the tree holds as a path from its root."""
    node, count = 0, 0
    for token in answer:
        child = next((int(c) for c in tree.children(node) if tree.token[c] == token), -1)
        if child < 0:
            break
        node, count = child, count + 1
    return count


def replay(
    drafter: Drafter, name: str, prompt: list[int], answer: list[int], plan: DraftPlan
) -> dict[str, float]:
    """Steps, and what they cost in processor milliseconds, until the answer is written."""
    sampling = SamplingParams(temperature=0.0, max_tokens=len(answer) + 1, stop_token_ids=(2,))
    totals = dict.fromkeys(("tokens", "steps", "drafted", "scored", "agreed", "forwards", "ms"), 0.0)
    totals["tokens"] = len(answer)
    heard, done = 0, 0
    while done < len(answer):
        known = [*prompt, *answer[:done]]
        spec = RequestSpec(request_id=name, tokens=known, prompt_len=len(prompt), sampling=sampling)
        item = DraftItem(
            request_id=name,
            start=heard,
            tokens=np.array(known[heard:] if heard else [], dtype=np.int32),
            plan=plan,
            spec=None if heard else spec,
        )
        begun = time.thread_time()
        result = drafter.draft(DraftCall(call_id=1, items=[item]))
        if heard:  # the first call reads the prompt
            totals["ms"] += 1e3 * (time.thread_time() - begun)
            totals["forwards"] += result.num_forwards
        heard = len(known)
        draft = result.drafts[0]
        totals["scored"] += draft.num_scored
        totals["agreed"] += draft.num_agreed
        totals["drafted"] += draft.tree.num_drafted
        totals["steps"] += 1
        done += accepted(draft.tree, answer[done:]) + 1
    rest = DraftItem(
        request_id=name,
        start=heard,
        tokens=np.array([*prompt, *answer][heard:], dtype=np.int32),
        plan=DraftPlan(0),
    )
    draft = drafter.draft(DraftCall(call_id=2, items=[rest])).drafts[0]
    totals["scored"] += draft.num_scored
    totals["agreed"] += draft.num_agreed
    drafter.draft(DraftCall(call_id=3, items=[], release=[name]))
    return totals


def main(
    prompts: Annotated[int, typer.Option(help="Held-out prompts per domain.")] = 60,
    depth: Annotated[int, typer.Option(help="Depth of the drafts.")] = 4,
    width: Annotated[int, typer.Option(help="Width of the drafts.")] = 1,
    drafter: Annotated[list[str] | None, typer.Option(help="Only this one; may repeat.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Replay the target's greedy answers against every kind of drafter."""
    torch.set_num_threads(1)
    tokenizer, target = load_tokenizer(weights_dir(TARGET)), models.load(weights_dir(TARGET))
    chosen = {domain: load_prompts(domain)[:prompts] for domain in DOMAINS}
    encoded = {d: [agreement.prompt_ids(tokenizer, p) for p in found] for d, found in chosen.items()}
    answers = {
        d: agreement.greedy_continuations(target, encoded[d], [p.max_tokens for p in found])
        for d, found in chosen.items()
    }
    vocab_size, max_tokens = len(tokenizer), int(target.config.max_position_embeddings)
    del target
    report: dict[str, Any] = {
        "environment": describe(),
        "prompts": prompts,
        "depth": depth,
        "width": width,
        "drafters": {},
    }
    for name in drafter or CONFIGS:
        built = build_pool_drafter(CONFIGS[name], vocab_size, max_tokens, f"zoo:{TARGET}")
        rows: dict[str, dict[str, float]] = {}
        for domain in DOMAINS:
            pairs = list(zip(encoded[domain], answers[domain], strict=True))
            each = [
                replay(built, f"{domain}-{i}", prompt, answer, DraftPlan(depth, width))
                for i, (prompt, answer) in enumerate(pairs)
            ]
            total = {key: sum(one[key] for one in each) for key in each[0]}
            calls = max(total["steps"] - len(each), 1)
            rows[domain] = {
                "acceptance": round(total["agreed"] / max(total["scored"], 1), 3),
                "tokens_per_step": round(total["tokens"] / total["steps"], 2),
                "drafted_per_call": round(total["drafted"] / total["steps"], 2),
                "forwards_per_call": round(total["forwards"] / calls, 2),
                "ms_per_call": round(total["ms"] / calls, 3),
            }
            print(f"{name:26} {domain:8} {rows[domain]}", flush=True)
        report["drafters"][name] = rows
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
