"""What the target waits for between its answer and its next call: the scheduler, and drafts made beside it.

python -m benchmarks.target_wait [--requests N ...] [--ahead] [--json FILE]

Drafts are proposed with the target's answers, as EAGLE's are, so that all that is left between them happens
in the cell's process: decoding the answer, committing, planning, drafting, selecting, encoding the next call.
The workers are a script, and no model runs; but the target takes its time, as an 8B model on an H200 does.
With `--ahead` steps are sent ahead: it waits only where the scheduler's work takes longer than its own.
"""

from __future__ import annotations

import argparse
import select
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
from rich.table import Table

from benchmarks import tables
from benchmarks.environment import describe
from benchmarks.scripted_workers import TOKEN, ScriptedWorkers
from cluster.cell_metrics import CellMetrics
from cluster.config import FlotillaConfig
from cluster.core_keeping import CoreKeeping
from cluster.draft_service import DraftService
from cluster.events import DrafterReady, VerifierReady
from cluster.scheduler_shell import SchedulerShell
from cluster.stream_messages import Submit
from drafters.heads_drafter import HeadsDrafter
from drafters.messages import DraftPlan
from engine.proposals import Proposals
from engine.proposed_growth import grown
from engine.sampling_params import SamplingParams
from engine.wire import Decoder, encode
from verifier.messages import PrefillItem, VerifyCall, VerifyItem, VerifyResult

NUM_SLOTS, MAX_TOKENS, VOCAB_SIZE = 1 << 20, 8192, 32_000
PROMPT_TOKENS, OUTPUT_TOKENS, DEPTH = 60, 6000, 6
WARM_STEPS = 40
# What verifying and drafting take.
VERIFY_S, DRAFT_S = 6e-3, 1.5e-3


@dataclass(frozen=True, slots=True)
class Wait:
    """Milliseconds between the answers of a target and its next calls: median, and 90th percentile.

    Attributes:
        policy: of the scheduler.
        requests: running.
        ms, p90_ms: between an answer and the next call, 0 for one that was there already.
        work_ms: median, until the scheduler has done all that follows from an answer.
        drafted: tokens accepted of each request and step.
        is_ahead: share of calls that were there already.
    """

    policy: str
    requests: int
    ms: float
    p90_ms: float
    work_ms: float
    drafted: float
    is_ahead: float


class ProposingTarget:
    """A target that takes drafts by chance, and proposes chains after what it committed."""

    def __init__(self, seed: int) -> None:
        self._workers = ScriptedWorkers(seed, NUM_SLOTS)
        self._lengths: dict[str, int] = {}
        self._newest: dict[str, Proposals] = {}
        self._rng = np.random.default_rng((seed, 1))

    def opened(self, request_id: str) -> None:
        """A request was submitted."""
        self._workers.left[request_id] = OUTPUT_TOKENS
        self._lengths[request_id] = PROMPT_TOKENS

    def answer(self, call: VerifyCall) -> VerifyResult:
        """Verdicts, with proposals for those that asked."""
        grown_here = [one if one.plan is None else self._grown(one, one.plan) for one in call.verify]
        call = msgspec.structs.replace(call, verify=grown_here)
        result = self._workers.verify(call, VERIFY_S)
        items: list[VerifyItem | PrefillItem] = [*call.verify, *call.prefill]
        asked = {one.request_id: one for one in items}
        share = DRAFT_S / max(1, len(asked))
        verdicts = []
        for one in (*result.verdicts, *(prefill.verdict for prefill in result.prefills)):
            if one is None:
                continue
            self._lengths[one.request_id] += len(one.tokens)
            width = asked[one.request_id].num_candidates
            layers = asked[one.request_id].num_heads or DEPTH
            proposed = self._proposed(self._lengths[one.request_id], layers, share) if width else None
            if proposed is not None:
                self._newest[one.request_id] = proposed
            verdicts.append(msgspec.structs.replace(one, proposals=proposed))
        by_id = {one.request_id: one for one in verdicts}
        return msgspec.structs.replace(
            result,
            verdicts=[by_id[one.request_id] for one in result.verdicts],
            prefills=[
                msgspec.structs.replace(one, verdict=by_id.get(one.request_id)) for one in result.prefills
            ],
        )

    def _grown(self, item: VerifyItem, plan: DraftPlan) -> VerifyItem:
        tree = grown(TOKEN, plan, frozenset(), self._newest.get(item.request_id))
        return msgspec.structs.replace(item, tree=tree)

    def _proposed(self, position: int, layers: int, seconds: float) -> Proposals:
        return Proposals(
            position=position,
            token=np.full((layers, 1), TOKEN, dtype=np.int32),
            logp=np.log(self._rng.uniform(0.5, 0.99, (layers, 1))).astype(np.float32),
            parent=np.zeros((layers, 1), dtype=np.int32),
            seconds=seconds,
        )


class Cell:
    """A scheduler with its shell, an EAGLE drafter in its process, and one front end."""

    def __init__(self, policy: str, seed: int, *, ahead: bool) -> None:
        config = FlotillaConfig.model_validate(
            {
                "target": {"path": "scripted", "heads": "scripted-eagle"},
                "drafters": [{"kind": "eagle", "path": "scripted-eagle"}],
                "policy": {"name": policy},
                "scheduler": {"async_scheduling": ahead},
            }
        )
        self.target = ProposingTarget(seed)
        self.waited: list[float] = []
        self.worked: list[float] = []
        self.drafted: list[float] = []
        self._sent: deque[VerifyCall] = deque()
        self._answered_at: float | None = None
        self._calls: Decoder[VerifyCall] = Decoder(VerifyCall)
        drafter = HeadsDrafter(
            num_heads=DEPTH, vocab_size=VOCAB_SIZE, max_tokens=MAX_TOKENS, kind="eagle", max_width=4
        )
        self._service = DraftService(drafter)
        self.shell = SchedulerShell(config, CellMetrics(), lambda name: None, lambda name: None)
        workers = SimpleNamespace(
            cores=CoreKeeping(config),
            send_verify=self._asked,
            send_draft=lambda name, call: self._service.draft(call),
        )
        clients = SimpleNamespace(send=lambda client, message: encode(message))
        self.shell.connect(cast(Any, workers), cast(Any, clients))
        self.shell.handle(VerifierReady(NUM_SLOTS, MAX_TOKENS, VOCAB_SIZE))
        self.shell.handle(DrafterReady("eagle", drafter.capabilities, 256, kind="eagle"))

    def submit(self, request_id: str) -> None:
        """One more request."""
        self.target.opened(request_id)
        sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS)
        prompt = [TOKEN] * PROMPT_TOKENS
        self.shell.told("front-end", Submit(request_id=request_id, prompt=prompt, sampling=sampling))

    def step(self) -> None:
        """Answer the call at hand."""
        call = self._sent.popleft()
        result = self.target.answer(call)
        answer = encode(result)
        rows = [len(one.nodes) for one in result.verdicts]
        self.drafted.append(sum(rows) / max(1, len(rows)))
        until = perf_counter() + VERIFY_S + DRAFT_S
        while perf_counter() < until:  # as with `busy_polling`: who sleeps wakes up to cold caches
            select.select([], [], [], 0.0)
        self._answered_at = begun = perf_counter()
        if self._sent:
            self.waited.append(0.0)
        self.shell.verified(0, answer)
        self.worked.append(perf_counter() - begun)

    def _asked(self, data: bytes) -> None:
        now = perf_counter()
        self._sent.append(self._calls.decode(data))
        if self._answered_at is not None and len(self._sent) == 1:
            self.waited.append(now - self._answered_at)
        self._answered_at = None


def measure(policy: str, requests: int, steps: int, *, ahead: bool = False, seed: int = 0) -> Wait:
    """So many steps of so many requests, which run from the first to the last."""
    cell = Cell(policy, seed, ahead=ahead)
    for number in range(requests):
        cell.submit(f"request-{number}")
    for _ in range(WARM_STEPS):
        cell.step()
    for measured in (cell.waited, cell.worked, cell.drafted):
        measured.clear()
    for _ in range(steps):
        cell.step()
    waited = sorted(cell.waited)
    return Wait(
        policy,
        requests,
        ms=1e3 * median(waited),
        p90_ms=1e3 * waited[len(waited) * 9 // 10],
        work_ms=1e3 * median(cell.worked),
        drafted=float(np.mean(cell.drafted)),
        is_ahead=waited.count(0.0) / len(waited),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--policy", nargs="+", default=["flotilla", "adaserve", "smartspec"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 12, 32])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ahead", action="store_true", help="steps may be sent ahead")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    asked = parser.parse_args(argv)
    table = Table(title="Between the target's answer and its next call")
    for column in ("policy", "requests", "ms", "90th percentile", "all work, ms", "accepted each", "ahead"):
        table.add_column(column, justify="right")
    found = []
    for policy in asked.policy:
        for requests in asked.requests:
            one = measure(policy, requests, asked.steps, ahead=asked.ahead)
            found.append(one)
            figures = (f"{value:.3f}" for value in (one.ms, one.p90_ms, one.work_ms))
            table.add_row(policy, str(requests), *figures, f"{one.drafted:.1f}", f"{one.is_ahead:.0%}")
    tables.console.print(table)
    if asked.json is not None:
        record = {
            "benchmark": "target-wait",
            "environment": describe(),
            "waits": [asdict(one) for one in found],
        }
        tables.write_json(asked.json, record)


if __name__ == "__main__":
    main()
