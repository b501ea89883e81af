"""A step with proposed drafts is sent while the forward before ends: who comes until then is read in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from cluster.cell_metrics import CellMetrics
from cluster.config import FlotillaConfig
from cluster.core_keeping import CoreKeeping
from cluster.events import DrafterReady, Tick, VerifierReady
from cluster.scheduler_shell import SchedulerShell
from cluster.stream_messages import Submit
from drafters.heads_drafter import HeadsDrafter
from engine.sampling_params import SamplingParams
from engine.wire import Decoder, encode
from tests.cluster.ahead_world import LONG, ends, ids, is_ahead
from tests.cluster.proposing_target import CANDIDATES, LAYERS, ProposingTarget
from tests.cluster.proposing_world import ProposingWorld, is_planned
from tests.cluster.simulated import VOCAB
from verifier.messages import VerifyCall


def test_who_comes_while_a_call_is_held_back_is_in_it() -> None:
    world = ProposingWorld(1)
    world.core.sending_ahead.holds_back = True
    world.begin("a", "b", sampling=ends(120))
    ahead = world.core.sending_ahead
    while (until := ahead.held_until) is None:  # its own drafter answers in turn
        world.answer_one()
    assert world.now < until
    assert world.num_at_target == 1
    world.send(Submit(request_id="new", prompt=[9] * 10, sampling=LONG))
    assert world.num_at_target == 1
    world.now = until
    world.handle(Tick())
    assert ahead.held_until is None
    assert world.num_at_target == 2
    call = world.calls[-1]
    assert is_planned(call)
    assert is_ahead(call)
    assert ids(call) == {"a", "b"}
    assert [item.request_id for item in call.prefill] == ["new"]
    # Where nobody asks again in time, the answer does.
    while world.answer_one():
        pass
    world.check_ends()


def test_a_plain_step_is_sent_at_once() -> None:
    world = ProposingWorld(1, "autoregressive")
    world.core.sending_ahead.holds_back = True
    world.begin("a", "b")
    for _ in range(10):
        assert world.num_at_target == 2
        assert world.core.sending_ahead.held_until is None
        world.answer_one()
    world.drain()
    world.check_ends()


def test_a_policy_that_plans_with_the_answer_is_not_asked_before() -> None:
    world = ProposingWorld(1, "smartspec")
    world.core.sending_ahead.holds_back = True
    world.begin("a", "b")
    while world.answer_one():
        assert world.core.sending_ahead.held_until is None
    world.check_ends()


@dataclass
class Alarm:
    """What the shell asked to be called for."""

    after_s: float
    call: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class ProposingCell:
    """A shell whose target proposes, and which is woken by the test."""

    def __init__(self) -> None:
        raw = {"target": {"path": "unused"}, "policy": {"name": "flotilla"}}
        config = FlotillaConfig.model_validate(raw)
        self.calls: list[VerifyCall] = []
        self.alarms: list[Alarm] = []
        drafter = HeadsDrafter(
            num_heads=LAYERS, vocab_size=VOCAB, max_tokens=200, num_candidates=CANDIDATES, kind="eagle"
        )
        self.shell = SchedulerShell(
            config, CellMetrics(), lambda name: None, lambda name: None, self._call_later
        )
        decoder = Decoder(VerifyCall)
        workers = SimpleNamespace(
            cores=CoreKeeping(config),
            send_verify=lambda data: self.calls.append(decoder.decode(data)),
            send_draft=lambda name, call: drafter.draft(call),
        )
        self.shell.connect(cast(Any, workers), cast(Any, SimpleNamespace(send=lambda *told: None)))
        self.target = ProposingTarget(4000, 400)
        self.shell.handle(VerifierReady(4000, 400, VOCAB))
        self.shell.handle(DrafterReady("eagle", drafter.capabilities, 64))

    def _call_later(self, after_s: float, call: Callable[[], None]) -> Alarm:
        self.alarms.append(Alarm(after_s, call))
        return self.alarms[-1]

    def answer(self) -> None:
        self.shell.verified(0, encode(self.target.step(self.calls.pop(0))))


def test_the_shell_has_itself_woken_for_the_next_call() -> None:
    cell = ProposingCell()
    sampling = SamplingParams(temperature=0.0, max_tokens=300)
    cell.shell.told("fe", Submit(request_id="a", prompt=[1, 2, 3], sampling=sampling))
    for _ in range(3):
        cell.answer()
    alarm = cell.alarms[-1]
    assert 0.0 < alarm.after_s < 0.1
    assert len(cell.calls) == 1
    # Whatever else happens meanwhile, it is woken once.
    num_alarms = len(cell.alarms)
    cell.shell.told("fe", Submit(request_id="b", prompt=[4, 5, 6], sampling=sampling))
    assert len(cell.alarms) == num_alarms
    assert not alarm.is_cancelled
    cell.shell.core.sending_ahead.planned_ahead.calls.all_outstanding[0].sent_at -= 1.0  # time passes
    alarm.call()
    assert len(cell.calls) == 2
    assert is_planned(cell.calls[-1])
    assert [item.request_id for item in cell.calls[-1].prefill] == ["b"]
    # Answered before it was woken, it sends what is to be sent and is woken for the call after.
    cell.answer()
    assert len(cell.calls) == 1
    held = cell.alarms[-1]
    cell.answer()
    assert held.is_cancelled
    assert len(cell.calls) == 1
