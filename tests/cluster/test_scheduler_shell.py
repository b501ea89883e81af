"""What the shell counts of steps and of messages from front ends."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from cluster import core_keeping
from cluster.cell_metrics import CellMetrics
from cluster.config import FlotillaConfig
from cluster.core_affinity import keep_to, usable_cores
from cluster.core_keeping import CoreKeeping
from cluster.events import DrafterReady, VerifierReady
from cluster.scheduler_shell import SchedulerShell
from cluster.stream_messages import Cancel, Objective, Speculation, Submit
from cluster.worker import VERIFIER
from drafters.messages import Draft, DraftCall, DraftResult
from engine.sampling_params import SamplingParams
from engine.tree import TokenTree
from engine.wire import Decoder, encode
from tests.cluster.simulated import SimulatedDrafter, SimulatedTarget
from verifier.messages import VerifyCall


class DraftingCell:
    """A shell with a target and a drafter that answer when the test says so."""

    def __init__(self, *, in_place: bool = False) -> None:
        raw = {"target": {"path": "unused"}, "policy": {"name": "fixed"}}
        config = FlotillaConfig.model_validate(raw)
        self.verify_calls: list[VerifyCall] = []
        self.draft_calls: list[DraftCall] = []
        self.metrics = CellMetrics()
        self.shell = SchedulerShell(config, self.metrics, lambda name: None, lambda name: None)
        verify, self.cores = Decoder(VerifyCall), CoreKeeping(config)
        workers = SimpleNamespace(
            cores=self.cores,
            send_verify=lambda data: self._sent("verify", verify.decode(data)),
            send_draft=lambda name, call: self.drafter.draft(call) if in_place else self._sent("draft", call),
        )
        clients = SimpleNamespace(send=lambda *told: self.order.append("told"))
        self.order: list[str] = []
        self.shell.connect(cast(Any, workers), cast(Any, clients))
        self.target = SimulatedTarget()
        self.drafter = SimulatedDrafter(0.5, random.Random(1))
        self.shell.handle(VerifierReady(400, 200, 50))
        self.shell.handle(DrafterReady("small", self.drafter.capabilities, 4))

    def _sent(self, what: str, call: VerifyCall | DraftCall) -> None:
        self.order.append(what)
        if isinstance(call, VerifyCall):
            self.verify_calls.append(call)
        else:
            self.draft_calls.append(call)

    def submit(self, name: str, speculation: str = "auto") -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=30)
        mode = Speculation(mode=speculation)
        submitted = Submit(request_id=name, prompt=[1, 2, 3], sampling=sampling, speculation=mode)
        self.shell.told("fe", submitted)

    def verify(self) -> None:
        self.shell.verified(0, encode(self.target.step(self.verify_calls.pop(0))))

    def draft(self) -> None:
        for call in [self.draft_calls.pop(0) for _ in list(self.draft_calls)]:
            self.shell.drafted("small", encode(self.drafter.draft(call)))

    def num_steps_timed(self) -> float:
        registry = self.metrics.set.registry
        return registry.get_sample_value("flotilla_step_seconds_count") or 0.0


def test_an_idle_time_that_began_while_drafters_worked_is_no_step() -> None:
    """A stop string matches, and the front end has the request ended between two answers of the target: what
    came hours later was taken for the end of a step of hours."""
    cell = DraftingCell()
    cell.submit("a")
    while cell.verify_calls:
        cell.draft()
        cell.verify()
    assert cell.draft_calls, "a draft is waited for"
    num_timed = cell.num_steps_timed()
    cell.shell.told("fe", Cancel("a", is_complete=True))
    assert cell.shell.core.is_idle
    cell.submit("b")
    cell.draft()
    cell.verify()
    assert cell.num_steps_timed() == num_timed
    # While there is work, they are timed.
    cell.draft()
    cell.verify()
    assert cell.num_steps_timed() == num_timed + 1.0


def test_a_request_that_is_taken_to_another_cell_is_not_counted_as_given_up() -> None:
    cell = DraftingCell()
    for name in ("moved", "given up"):
        cell.submit(name)
        cell.shell.told("fe", Cancel(name, is_moved=name == "moved"))
    assert not cell.shell.core.requests
    sample = cell.metrics.set.registry.get_sample_value
    labels = {"finish_reason": "cancelled", "tier": "default"}
    assert sample("flotilla_requests_total", labels) == 1.0


def test_a_request_counts_as_accepted_when_it_is_taken_and_once_in_all_cells() -> None:
    """It did when it ended: while load rose, a few refusals were most of what had been decided."""
    cell = DraftingCell()
    sample = cell.metrics.set.registry.get_sample_value

    def decided(decision: str) -> float:
        return sample("flotilla_admission_decisions_total", {"decision": decision, "tier": "default"}) or 0.0

    cell.submit("a")
    assert (decided("accepted"), decided("rejected")) == (1.0, 0.0)
    cell.submit("a")  # refused: its id is that of a request that runs
    assert (decided("accepted"), decided("rejected")) == (1.0, 1.0)
    sampling = SamplingParams(temperature=0.0, max_tokens=30)
    taken = Submit(request_id="b", prompt=[1], sampling=sampling, was_taken=True)
    cell.shell.told("fe", taken)
    assert set(cell.shell.core.requests) == {"a", "b"}
    for name in ("a", "b"):
        cell.shell.told("fe", Cancel(name))
    assert (decided("accepted"), decided("rejected")) == (1.0, 1.0)
    strict = msgspec.structs.replace(taken, objective=Objective(ttft_ms=1.0))
    cell.metrics.admitted(strict, taken)
    assert decided("downgraded") == 1.0


def test_what_is_drafted_in_place_is_verified_before_clients_are_told() -> None:
    """Else the target waits while answers are encoded and written, and requests accounted for."""
    cell = DraftingCell(in_place=True)
    cell.submit("a")
    cell.verify()  # the prompt
    registry = cell.metrics.set.registry
    for _ in range(3):
        cell.order.clear()
        (call,) = cell.verify_calls
        assert call.verify[0].num_nodes > 1, "drafted for"
        cell.verify()
        assert cell.order == ["verify", "told"]
    assert registry.get_sample_value("flotilla_draft_call_seconds_count", {"drafter": "small"}) == 5, (
        "one read"
    )
    assert not cell.draft_calls


def test_what_is_drafted_elsewhere_is_asked_for_before_clients_are_told() -> None:
    cell = DraftingCell()
    cell.submit("a")
    cell.draft()  # reads the prompt meanwhile
    cell.order.clear()
    cell.verify()
    assert cell.order == ["draft", "told"]


def test_a_draft_without_a_root_costs_nobody_their_worker() -> None:
    """It was counted as minus one token, which no counter takes: its drafter was taken for lost."""
    cell = DraftingCell()
    cell.submit("a")
    cell.draft()  # reads the prompt meanwhile
    cell.verify()
    (call,) = cell.draft_calls
    draft = Draft(request_id="a", tree=TokenTree.of([], [], [], []))
    cell.shell.drafted("small", encode(DraftResult(call_id=call.call_id, drafts=[draft])))
    (asked,) = cell.verify_calls
    assert asked.verify[0].num_nodes == 1, "goes on without a draft"
    sample = cell.metrics.set.registry.get_sample_value
    assert sample("flotilla_drafter_tokens_total", {"drafter": "small", "outcome": "drafted"}) == 0.0


@pytest.mark.parametrize("can_choose", [True, False])
def test_the_scheduler_leaves_the_targets_core_while_steps_are_sent_ahead(
    can_choose: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It and the target work at the same time then: on one core plain steps took a sixth longer."""
    everywhere = usable_cores()
    core = min(everywhere, default=0)

    async def claimed(num_ranks: int, num_drafters: int) -> int | None:
        return core if can_choose else None

    monkeypatch.setattr(core_keeping, "this_node", lambda: "here")
    target: Any = SimpleNamespace(
        actors=[SimpleNamespace(claim_core=SimpleNamespace(remote=claimed))], where=[("here", "")]
    )
    cell = DraftingCell()
    on_core = frozenset({core}) if can_choose and everywhere else everywhere
    try:
        asyncio.run(cell.cores.settle(target, {VERIFIER: target}))
        assert usable_cores() == on_core
        cell.submit("plain", speculation="off")
        assert len(cell.verify_calls) == 2, "one is sent ahead"
        assert usable_cores() == on_core, "who knows whether more are"
        cell.verify()
        assert usable_cores() == everywhere
        cell.submit("drafted for")
        for _ in range(20):
            assert usable_cores() == everywhere
            if cell.draft_calls:
                cell.draft()  # it reads the prompt
            else:
                cell.verify()
            if any(item.plan.depth for call in cell.draft_calls for item in call.items):
                break
        assert usable_cores() == on_core
        # Two of a kind in a row, or drafts; a target that is loaded anew begins anew.
        for ahead, expected in ((1, on_core), (1, everywhere), (0, everywhere), (0, on_core), (1, on_core)):
            cell.cores.sent(is_ahead=bool(ahead))
            assert usable_cores() == expected
        cell.cores.drafted()
        cell.cores.sent(is_ahead=True)
        assert usable_cores() == on_core
        asyncio.run(cell.cores.settle(target, {VERIFIER: target}))
        cell.cores.sent(is_ahead=True)
        assert usable_cores() == on_core
    finally:
        keep_to(everywhere)
