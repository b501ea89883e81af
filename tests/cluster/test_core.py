"""The scheduler core under random schedules: every accepted request ends once, with the right tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.events import (
    Action,
    Cancelled,
    ClientLost,
    Draft,
    DraftDone,
    DrafterReady,
    Emit,
    Event,
    Reject,
    RequestArrived,
    Tick,
    VerifierReady,
    Verify,
    VerifyDone,
    WorkerLost,
)
from cluster.invariants import check_invariants
from cluster.policies.registry import POLICIES, make_policy
from cluster.stream_messages import Objective, Speculation, Submit
from engine.sampling_params import SamplingParams
from tests.cluster.simulated import (
    VOCAB,
    SimulatedDrafter,
    SimulatedTarget,
    expected_output,
    submit,
)
from tests.examples import examples
from verifier.messages import TokenLogprobs


class World:
    """The core with simulated workers; the test decides in which order their answers arrive."""

    def __init__(
        self,
        seed: int,
        policy: str | dict[str, object],
        micro_batches: int | str = 1,
        num_slots: int = 400,
        batching: str = "flotilla",
        selector: str = "flotilla",
        **scheduler: object,
    ) -> None:
        self.rng = random.Random(seed)
        self.config = FlotillaConfig.model_validate(
            {
                "target": {"path": "unused"},
                "policy": {"name": policy} if isinstance(policy, str) else policy,
                "selector": {"name": selector},
                "scheduler": {
                    "batching": batching,
                    "micro_batches": micro_batches,
                    "prefill_chunk": 24,
                    "max_running": 12,
                    "max_waiting": 40,
                    **scheduler,
                },
            }
        )
        policy = make_policy(self.config.policy, goes_on=True)
        self.core = SchedulerCore(self.config, policy, CostModel(DEFAULT_PROFILE))
        self.target = self.make_target(num_slots)
        self.drafters: dict[str, SimulatedDrafter] = {}
        self.answers: list[Event] = []
        self.now = 0.0
        self.output: dict[str, list[int]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self.reason: dict[str, str] = {}
        self.rejected: dict[str, str] = {}
        self.submitted: dict[str, Submit] = {}
        self.start_target()
        for name in ("good", "poor"):
            self.start_drafter(name)

    def start_target(self) -> None:
        self.target = self.make_target(self.target.num_slots)
        self.handle(VerifierReady(self.target.num_slots, self.target.max_tokens, self.target.vocab_size))

    def make_target(self, num_slots: int) -> SimulatedTarget:
        """For worlds of another target."""
        return SimulatedTarget(num_slots)

    def expected(self, request: Submit) -> list[int]:
        """What the target alone would have said."""
        return expected_output(request, self.core.max_model_tokens)

    def start_drafter(self, name: str) -> None:
        self.drafters[name] = SimulatedDrafter(0.8 if name == "good" else 0.2, self.rng)
        self.handle(DrafterReady(name, self.drafters[name].capabilities, 6))

    def send(self, request: Submit, client: str = "a") -> None:
        self.submitted[request.request_id] = request
        self.handle(RequestArrived(request, client))

    def handle(self, event: Event) -> None:
        self.now += 0.003
        self._act(self.core.handle(event, self.now))
        self._act(self.core.reflect())
        check_invariants(self.core)

    def _act(self, actions: Sequence[Action]) -> None:
        self.observe(actions)
        for action in actions:
            match action:
                case Draft(name, call):
                    self.answers.append(DraftDone(name, self.drafters[name].draft(call)))
                case Verify(call):
                    num_sent = sum(isinstance(answer, VerifyDone) for answer in self.answers)
                    most = (
                        2 if self.config.scheduler.async_scheduling else min(2, self.core.micro_batches.count)
                    )
                    assert num_sent < most
                    self.answers.append(VerifyDone(self.target.step(call)))
                case Emit(_, events):
                    for event in events:
                        assert event.request_id not in self.reason, "an event after the end"
                        output = self.output.setdefault(event.request_id, [])
                        assert event.position == len(output)
                        output.extend(event.tokens)
                        self.prompt_logprobs.setdefault(event.request_id, []).extend(event.prompt_logprobs)
                        if event.finish_reason is not None:
                            self.reason[event.request_id] = event.finish_reason
                            assert event.receipt is not None
                case Reject(_, rejection):
                    self.rejected[rejection.request_id] = rejection.code

    def observe(self, actions: Sequence[Action]) -> None:
        """For worlds that watch more."""

    def answer_one(self) -> bool:
        """Deliver one outstanding answer; those of one worker keep their order."""
        if not self.answers:
            return False
        first_of: dict[str, int] = {}
        for index, answer in enumerate(self.answers):
            worker = answer.drafter if isinstance(answer, DraftDone) else "verifier"
            first_of.setdefault(worker, index)
        self.handle(self.answers.pop(self.rng.choice(sorted(first_of.values()))))
        return True

    def lose(self, name: str) -> None:
        self.answers = [
            a for a in self.answers if (a.drafter if isinstance(a, DraftDone) else "verifier") != name
        ]
        self.handle(WorkerLost(name))

    def drain(self, limit: int = 20000) -> None:
        for _ in range(limit):
            if not self.answer_one():
                return
        raise AssertionError("the core does not come to rest")

    def check_ends(self, cancelled: frozenset[str] = frozenset()) -> None:
        for request_id, request in self.submitted.items():
            if request_id in self.rejected:
                assert request_id not in self.reason
                continue
            assert request_id in self.reason, f"{request_id} was lost"
            expected = self.expected(request)
            got = self.output[request_id]
            if self.reason[request_id] == "cancelled":
                assert request_id in cancelled
                assert got == expected[: len(got)]
            else:
                assert got == expected
        assert not self.core.requests
        assert self.core.is_idle


# With one micro-batch tests/cluster/test_step_traces.py checks the texts of all policies.
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("micro_batches", [3, "auto", pytest.param(1, marks=pytest.mark.thorough)])
def test_every_policy_returns_the_targets_own_text(policy: str, micro_batches: int | str) -> None:
    world = World(3, policy, micro_batches)
    for number in range(20):
        world.send(submit(number, world.rng))
        if number % 3 == 0:
            world.answer_one()
    world.drain()
    world.check_ends()
    assert not world.rejected


def test_speculation_takes_fewer_steps_than_plain_decoding() -> None:
    steps = {}
    for policy in ("flotilla", "adaserve", "autoregressive"):
        world = World(1, policy)
        sampling = SamplingParams(temperature=0.0, max_tokens=60)
        world.send(submit(0, random.Random(5), sampling=sampling))
        world.drain()
        steps[policy] = world.target.calls
    assert steps["flotilla"] < 0.7 * steps["autoregressive"]
    assert steps["adaserve"] < 0.7 * steps["autoregressive"]


def test_a_full_kv_pool_preempts_and_loses_nothing() -> None:
    world = World(7, "flotilla", num_slots=220)
    for number in range(20):
        world.send(submit(number, world.rng, sampling=SamplingParams(temperature=0.0, max_tokens=60)))
    world.drain()
    world.check_ends()
    assert world.core.totals.preemptions > 0


def test_the_request_with_an_objective_is_preempted_last() -> None:
    world = World(2, "autoregressive", num_slots=150)
    urgent = submit(0, random.Random(1), objective=Objective(tpot_ms=5.0))
    world.send(urgent)
    for number in range(1, 10):
        world.send(submit(number, world.rng))
    world.drain()
    world.check_ends()


def test_speculation_off_never_drafts() -> None:
    world = World(4, "fixed")
    world.send(submit(0, world.rng, speculation=Speculation(mode="off")))
    world.drain()
    world.check_ends()
    assert world.core.totals.drafted_tokens == 0


def test_draft_tokens_stay_within_the_requests_own_limit() -> None:
    world = World(4, "fixed")
    sent: list[int] = []
    step = world.target.step

    def spy(call):  # type: ignore[no-untyped-def]
        sent.extend(item.num_nodes - 1 for item in call.verify)
        return step(call)

    world.target.step = spy  # type: ignore[method-assign]
    world.send(submit(0, world.rng, speculation=Speculation(max_tokens=2)))
    world.drain()
    world.check_ends()
    assert max(sent) <= 2


def test_a_named_drafter_is_the_only_one_used() -> None:
    world = World(4, "fixed")
    world.send(submit(0, world.rng, speculation=Speculation(drafters=("poor",))))
    world.drain()
    world.check_ends()
    assert set(world.core.totals.verified_by_drafter) == {"poor"}


def test_a_slow_drafter_is_not_waited_for() -> None:
    world = World(5, "fixed")
    world.send(submit(0, world.rng, sampling=SamplingParams(temperature=0.0, max_tokens=30)))
    while not any(isinstance(a, DraftDone) and a.result.drafts[0].tree.num_drafted for a in world.answers):
        assert world.answer_one()
    held = [a for a in world.answers if isinstance(a, DraftDone)]
    world.answers = [a for a in world.answers if not isinstance(a, DraftDone)]
    world.now += 10.0
    world.handle(Tick())
    assert any(isinstance(a, VerifyDone) for a in world.answers), "verified without the late draft"
    world.answers.extend(held)
    world.drain()
    world.check_ends()


def test_a_resubmitted_request_continues_where_it_was() -> None:
    world = World(6, "flotilla")
    whole = submit(0, world.rng)
    expected = expected_output(whole, 160)
    half = expected[: len(expected) // 2]
    world.output["r0"] = list(half)
    world.send(Submit(request_id="r0", prompt=whole.prompt, sampling=whole.sampling, output=half))
    world.drain()
    assert world.output["r0"] == expected


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"prompt": []}, "empty_prompt"),
        ({"prompt": [1] * 500}, "prompt_too_long"),
        ({"prompt": [VOCAB]}, "bad_token"),
        ({"prompt": [-1]}, "bad_token"),
        ({"adapter": "nobody's"}, "unknown_adapter"),
        ({"objective": Objective(tpot_ms=0.001)}, "slo_infeasible"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_door(changes: dict[str, object], code: str) -> None:
    world = World(0, "flotilla")
    world.send(submit(0, world.rng, **changes))
    assert world.rejected == {"r0": code}
    assert world.core.is_idle


def test_a_full_queue_says_when_to_come_back() -> None:
    world = World(0, "flotilla")
    for number in range(60):
        world.send(submit(number, world.rng))
    assert set(world.rejected.values()) == {"queue_full"}
    world.drain()
    world.check_ends()


@examples(150)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_random_schedules_with_losses_lose_nothing(seed: int, data: st.DataObject) -> None:
    world = World(
        seed,
        data.draw(st.sampled_from(sorted(POLICIES))),
        data.draw(st.sampled_from([1, 2, 3, "auto", "spin"])),
        data.draw(st.sampled_from([240, 400, 2000])),
    )
    cancelled: set[str] = set()
    number = 0
    for _ in range(data.draw(st.integers(5, 60))):
        match data.draw(st.sampled_from(["send", "answer", "answer", "answer", "cancel", "tick", "lose"])):
            case "send":
                world.send(submit(number, world.rng), client=world.rng.choice("ab"))
                number += 1
            case "answer":
                world.answer_one()
            case "cancel" if world.core.requests:
                victim = world.rng.choice(sorted(world.core.requests))
                cancelled.add(victim)
                world.handle(Cancelled(victim))
            case "tick":
                world.now += world.rng.choice([0.1, 5.0])
                world.handle(Tick())
            case "lose":
                name = world.rng.choice(["good", "poor", "verifier", "client"])
                if name == "client":
                    cancelled.update(r for r, q in world.core.requests.items() if q.client == "b")
                    world.handle(ClientLost("b"))
                elif name == "verifier":
                    world.lose(name)
                    world.start_target()
                else:
                    world.lose(name)
                    world.start_drafter(name)
    world.drain()
    world.check_ends(frozenset(cancelled))
    assert all(drafter.held.keys() <= world.submitted.keys() for drafter in world.drafters.values())


def test_no_drafter_reads_for_a_policy_that_never_drafts() -> None:
    """Reading costs cores and memory bandwidth that the target needs."""
    for policy, reads in (("autoregressive", False), ("fixed", True)):
        world = World(4, policy)
        for number in range(10):
            world.send(submit(number, world.rng))
        world.drain()
        world.check_ends()
        assert any(drafter.prompt_len for drafter in world.drafters.values()) is reads


def test_that_drafts_did_not_pay_for_many_keeps_no_prompt_of_few_from_being_read() -> None:
    """Unread prompts could not show that it pays."""
    world = World(5, "flotilla")
    for _ in range(100):
        world.core.planner.proposing.planned(12, 0.0)
    for number in range(1, 4):  # none of those that are read all the same
        world.send(submit(number, world.rng))
        world.drain()
    world.check_ends()
    assert world.core.totals.drafted_tokens > 0


def test_that_drafts_did_not_pay_keeps_nobody_from_drafting_once_they_do() -> None:
    """The policy is asked as if all had been read: few that are would never pay for a drafted step."""

    class Watched(World):
        drafted: frozenset[str] = frozenset()

        def observe(self, actions: Sequence[Action]) -> None:
            calls = [action.call for action in actions if isinstance(action, Draft)]
            self.drafted |= {item.request_id for call in calls for item in call.items if item.plan.depth}

    world = Watched(5, "flotilla")
    for _ in range(100):
        world.core.planner.proposing.planned(7, 0.0)
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    for number in range(1, 8):  # none of those that are read all the same
        world.send(submit(number, world.rng, sampling=sampling))
    assert len(world.core.running) == 7
    world.drain()
    world.check_ends()
    assert world.drafted == world.submitted.keys()
