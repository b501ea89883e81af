"""What a verify call takes the host beside its forward: planning, decisions, verdicts, KV slots.

python -m benchmarks.verifier_cost [--json FILE]

The model's part is left out: logits are there already, those of random numbers, and so is what EAGLE
drafts. On a GPU, whose forward of an 8B model takes 5 to 8 ms, this is what it waits for between two
forwards, but for the decisions.
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
from benchmarks.tables import console
from engine.devices import CPU, Stopwatch
from engine.draft_plan import DraftPlan
from engine.proposals import Proposals
from engine.runner import KeyTokens, ModelShape, Segment
from engine.sampling_params import RequestSpec, SamplingParams
from engine.stop_rules import StopRule
from engine.tree import TokenTree
from verifier.messages import PrefillItem, VerifyCall, VerifyItem
from verifier.proposing import Asking, Read
from verifier.verifier import Verifier

PROMPT_TOKENS, MOST_TOKENS = 300, 4096


class NoModel:
    """A `ModelRunner` whose logits are there before it is asked."""

    key_tokens = KeyTokens(0, 0)

    def __init__(self, num_slots: int, rows: int, vocab: int) -> None:
        """Logits for so many rows."""
        self.num_slots = num_slots
        self.shape = ModelShape(vocab, MOST_TOKENS, num_layers=1, kv_bytes_per_token=1)
        generator = torch.Generator().manual_seed(0)
        self._logits = torch.randn(rows, vocab, generator=generator)

    def forward(self, segments: Sequence[Segment], keep: NDArray[np.int32]) -> torch.Tensor:
        """See `ModelRunner`."""
        return self._logits[: len(keep)]


class NoLayer:
    """A `ReadingProposer` of chains that are there before it is asked."""

    def __init__(self, depth: int, vocab: int) -> None:
        """So deep."""
        self._depth, self._vocab = depth, vocab
        self._rng = np.random.default_rng(0)

    def hold(self, num_rows: int) -> torch.Tensor:
        """See `ReadingProposer`."""
        return torch.empty(num_rows, 0)

    def read(self, reads: Sequence[Read], *, is_asked: bool, held: torch.Tensor | None = None) -> Stopwatch:
        """See `ReadingProposer`."""
        watch = Stopwatch(CPU)
        watch.stop()
        return watch

    def release(self, request_id: str) -> None:
        """See `ReadingProposer`."""

    def forget_all(self) -> None:
        """See `ReadingProposer`."""

    def propose(
        self, asking: Sequence[Asking], rule: StopRule | None = None
    ) -> Callable[[], list[Proposals]]:
        """See `Proposer`."""
        shape = (len(asking), self._depth, 1)
        token = self._rng.integers(0, self._vocab, shape, dtype=np.int32)
        logp, parent = np.full(shape, -0.1, dtype=np.float32), np.zeros(shape, dtype=np.int32)
        positions = [len(one.state.tokens) + len(one.tokens) for one in asking]
        found = [
            Proposals(position=position, token=token[i], logp=logp[i], parent=parent[i])
            for i, position in enumerate(positions)
        ]
        return lambda: found


@dataclass(frozen=True)
class Cost:
    """Processor milliseconds of a call, the median, for so many requests with trees of so many nodes."""

    requests: int
    nodes: int
    pool: int
    ms: float


def measure(
    requests: int, nodes: int, pool: int, calls: int, *, is_ahead: bool = False, vocab: int = 4096
) -> Cost:
    """Verify chains that the target nearly always refuses, of requests that began with one prompt.

    If `is_ahead`, as of calls that are sent before the token at the root is known: the root alone, or a chain
    as was proposed beside the target.
    """
    rng = np.random.default_rng(0)
    depth = nodes - 1 if is_ahead else 0
    proposer = NoLayer(depth, vocab) if depth else None
    verifier = Verifier(NoModel(pool, requests * nodes, vocab), proposer=proposer)
    prompt = rng.integers(0, vocab, PROMPT_TOKENS).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS - PROMPT_TOKENS)
    names = [f"r{number}" for number in range(requests)]
    specs = [
        RequestSpec(request_id=name, tokens=prompt, prompt_len=PROMPT_TOKENS, sampling=params)
        for name in names
    ]
    chunks = [
        PrefillItem(request_id=name, num_tokens=PROMPT_TOKENS, spec=spec, num_candidates=min(depth, 1))
        for name, spec in zip(names, specs, strict=True)
    ]
    done = verifier.step(VerifyCall(call_id=0, prefill=chunks)).prefills
    roots = {one.request_id: one.verdict.tokens[-1] for one in done if one.verdict is not None}
    found = []
    for number in range(calls):
        if is_ahead:
            plan = DraftPlan(depth=depth, width=1) if depth else None
            items = [
                VerifyItem(request_id=name, plan=plan, num_candidates=min(depth, 1), num_heads=depth or None)
                for name in names
            ]
        else:
            drafts = rng.integers(0, vocab, (requests, nodes - 1)).tolist()
            items = [
                VerifyItem(request_id=name, tree=TokenTree.chain(roots[name], draft, [-0.5] * (nodes - 1)))
                for name, draft in zip(names, drafts, strict=True)
            ]
        call = VerifyCall(call_id=number + 1, verify=items)
        start = time.thread_time()
        result = verifier.step(call)
        found.append(time.thread_time() - start)
        assert result.num_tokens == requests * nodes
        roots = {verdict.request_id: verdict.tokens[-1] for verdict in result.verdicts}
    return Cost(requests, nodes, pool, median(found[calls // 4 :]) * 1e3)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--pool", type=int, nargs="+", default=[65_536, 1_048_576], help="KV slots")
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument(
        "--ahead", action="store_true", help="calls that are sent ahead, with chains as EAGLE proposes them"
    )
    parser.add_argument(
        "--vocab",
        type=int,
        default=4096,
        help="tokens; decisions over few take next to nothing, as for a GPU",
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    table = Table(title="Host's part of a verify call (medians)")
    for column in ("KV slots", "requests", "nodes each", "ms", "us a request"):
        table.add_column(column, justify="right")
    costs = []
    for pool in arguments.pool:
        for nodes in arguments.nodes:
            for requests in arguments.requests:
                cost = measure(
                    requests,
                    nodes,
                    pool,
                    arguments.calls,
                    is_ahead=arguments.ahead,
                    vocab=arguments.vocab,
                )
                costs.append(cost)
                table.add_row(
                    f"{pool:,}",
                    str(requests),
                    str(nodes),
                    f"{cost.ms:.3f}",
                    f"{cost.ms / requests * 1e3:.1f}",
                )
    console.print(table)
    if arguments.json is not None:
        record = {"environment": describe(), "costs": [asdict(cost) for cost in costs]}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
