"""Tokens of a target whose ranks are known to disagree are not committed; those of the next target are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from cluster.cell_metrics import CellMetrics
from cluster.config import FlotillaConfig
from cluster.core_keeping import CoreKeeping
from cluster.events import VerifierReady, WorkerLost
from cluster.scheduler_shell import SchedulerShell
from cluster.stream_messages import Submit, TokenBatch
from cluster.worker import VERIFIER
from engine.sampling_params import SamplingParams
from engine.wire import Decoder, encode
from verifier.messages import PrefillProgress, Verdict, VerifyCall, VerifyResult


class Ranks:
    """A shell whose target has two ranks, which answer as the test says; one request."""

    def __init__(self) -> None:
        raw = {
            "target": {"path": "unused", "tensor_parallel": 2},
            "policy": {"name": "autoregressive"},
            "scheduler": {"async_scheduling": False},
        }
        config = FlotillaConfig.model_validate(raw)
        self.calls: list[VerifyCall] = []
        self.tokens: list[int] = []
        self.num_killed = 0
        metrics = CellMetrics()
        metrics.configured(config, "m")
        self.shell = SchedulerShell(config, metrics, lambda name: None, lambda name: None)
        decoder: Decoder[VerifyCall] = Decoder(VerifyCall)
        workers = SimpleNamespace(
            cores=CoreKeeping(config),
            send_verify=lambda data: self.calls.append(decoder.decode(data)),
            kill_target=self.kill,
        )
        self.shell.connect(cast(Any, workers), cast(Any, SimpleNamespace(send=self.told)))
        self.shell.handle(VerifierReady(1000, 200, 50))
        sampling = SamplingParams(max_tokens=9)
        self.shell.told("front-end", Submit(request_id="a", prompt=[1, 2, 3], sampling=sampling))

    def kill(self) -> None:
        self.num_killed += 1

    def told(self, client: str, message: object) -> None:
        if isinstance(message, TokenBatch):
            self.tokens += [token for event in message.events for token in event.tokens]

    def answer(self, rank: int, digest: int) -> None:
        """Rank 0 says that the prompt is read and 7 is the first token; others send a checksum only."""
        call_id = self.calls[-1].call_id
        result = VerifyResult(call_id=call_id, digest=digest)
        if rank == 0:
            verdict = Verdict(request_id="a", tokens=[7])
            done = PrefillProgress(request_id="a", num_computed=3, verdict=verdict)
            result = VerifyResult(call_id=call_id, digest=digest, free_slots=990, prefills=[done])
        self.shell.verified(rank, encode(result))


def test_tokens_known_to_be_disputed_are_not_committed() -> None:
    ranks = Ranks()
    ranks.answer(1, digest=111)
    ranks.answer(0, digest=222)
    assert ranks.num_killed == 1
    assert ranks.tokens == []
    # The target is built anew: whatever its ranks say from now on counts.
    ranks.shell.handle(WorkerLost(VERIFIER))
    ranks.shell.restarted(VERIFIER)
    ranks.shell.handle(VerifierReady(1000, 200, 50))
    assert len(ranks.calls) == 2, "the prompt is read once more"
    ranks.answer(1, digest=333)
    ranks.answer(0, digest=333)
    assert ranks.num_killed == 1
    assert ranks.tokens == [7]


def test_what_disagreeing_ranks_still_answer_is_not_taken_either() -> None:
    ranks = Ranks()
    ranks.answer(0, digest=222)
    assert ranks.tokens == [7], "rank 0 is not made to wait"
    disputed, ranks.calls = ranks.calls[0].call_id, ranks.calls[1:]
    ranks.shell.verified(1, encode(VerifyResult(call_id=disputed, digest=111)))
    assert ranks.num_killed == 1
    result = VerifyResult(
        call_id=ranks.calls[0].call_id, free_slots=990, verdicts=[Verdict(request_id="a", tokens=[8])]
    )
    ranks.shell.verified(0, encode(result))
    assert ranks.tokens == [7]
