"""What the fault search found in the scheduler, each as the shortest story that shows it."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks import chaos
from benchmarks.chaos_schedule import Schedule, Settings, drawn
from benchmarks.chaos_world import ChaosWorld
from cluster.config import FlotillaConfig
from cluster.events import DraftDone, RequestArrived, Tick, WorkerLost
from cluster.invariants import check_invariants
from cluster.stream_messages import Objective
from deployments.pending_requests import Pending
from drafters.messages import Draft, DraftResult
from engine.sampling_params import SamplingParams
from engine.tree import TokenTree
from tests.cluster.simulated import VOCAB, expected_output, submit
from tests.cluster.test_core import World


def world_without_target(policy: str = "flotilla") -> World:
    """One request is being served, and the target has just died."""
    world = World(3, policy)
    world.send(submit(0, world.rng, sampling=SamplingParams(temperature=0.0, max_tokens=30)))
    world.answer_one()
    world.answers.clear()
    world.handle(WorkerLost("verifier"))
    return world


def test_what_is_resubmitted_while_the_target_is_away_is_not_cut_short() -> None:
    """The longest sequence served was taken for 0 meanwhile, so the request ended at once as too long."""
    world = world_without_target()
    whole = submit(1, world.rng, sampling=SamplingParams(temperature=0.0, max_tokens=20))
    expected = expected_output(whole, 160)
    world.output["r1"] = expected[:5]
    world.send(replace(whole, output=expected[:5]))
    assert "r1" not in world.reason
    world.start_target()
    world.drain()
    world.check_ends()
    assert world.output["r1"] == expected


@pytest.mark.parametrize(
    ("prompt", "code"),
    [([1] * 500, "prompt_too_long"), ([VOCAB], "bad_token"), ([-1], "bad_token")],
)
def test_what_cannot_be_served_is_refused_also_while_the_target_is_away(prompt: list[int], code: str) -> None:
    """It was queued, and broke the target when that was back."""
    world = world_without_target()
    world.send(submit(1, world.rng, prompt=prompt))
    assert world.rejected == {"r1": code}
    world.start_target()
    world.drain()
    world.check_ends()


ARRAYS = ("token", "parent", "logp", "depth")


def chain(root: int, length: int, **arrays: object) -> TokenTree:
    made = TokenTree.chain(root, [(root + i) % VOCAB for i in range(length)], [-0.1] * length)
    fields = {name: getattr(made, name) for name in ARRAYS}
    return TokenTree(**(fields | arrays))


MALFORMED = {
    "no nodes": lambda root: chain(root, 1, **dict.fromkeys(ARRAYS, np.zeros(0, np.int32))),
    "another root": lambda root: chain((root + 1) % VOCAB, 3),
    "outside the vocabulary": lambda root: chain(root, 2, token=np.array([root, 3, VOCAB], np.int32)),
    "a negative token": lambda root: chain(root, 2, token=np.array([root, -3, 1], np.int32)),
    "parent after its child": lambda root: chain(root, 2, parent=np.array([-1, 2, 0], np.int32)),
    "parent of itself": lambda root: chain(root, 2, parent=np.array([-1, 1, 1], np.int32)),
    "two roots": lambda root: chain(root, 2, parent=np.array([-1, -1, 0], np.int32)),
    "no root": lambda root: chain(root, 2, parent=np.array([0, 0, 1], np.int32)),
    "wrong depths": lambda root: chain(root, 2, depth=np.array([0, 2, 3], np.int32)),
    "root below": lambda root: chain(root, 2, depth=np.array([1, 2, 3], np.int32)),
    "lengths differ": lambda root: chain(root, 2, logp=np.zeros(2, np.float32)),
    "no numbers": lambda root: chain(root, 2, logp=np.full(3, np.nan, np.float32)),
    "no number alone": lambda root: chain(root, 0, logp=np.full(1, np.nan, np.float32)),
    "too deep": lambda root: chain(root, 190),
}


@pytest.mark.parametrize("malformed", MALFORMED)
@pytest.mark.parametrize("policy", ["fixed", "flotilla", "adaserve"])
def test_no_drafter_can_break_the_scheduler(
    malformed: str, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Malformed trees raised in the policy or reached the target; only what was drafted may be lost."""
    world = World(5, policy)
    for number in range(4):
        world.send(submit(number, world.rng, sampling=SamplingParams(temperature=0.0, max_tokens=30)))
    corrupt: set[tuple[str, int]] = set()
    caplog.set_level(logging.ERROR)
    for _ in range(2000):
        for index, answer in enumerate(world.answers):
            if not isinstance(answer, DraftDone) or (answer.drafter, answer.result.call_id) in corrupt:
                continue
            if any(draft.tree.num_drafted for draft in answer.result.drafts):
                drafts = [
                    Draft(request_id=d.request_id, tree=MALFORMED[malformed](int(d.tree.token[0])))
                    if i % 2 == 0
                    else d
                    for i, d in enumerate(answer.result.drafts)
                ]
                result = DraftResult(call_id=answer.result.call_id, drafts=drafts)
                world.answers[index] = DraftDone(answer.drafter, result)
                corrupt.add((answer.drafter, result.call_id))
        if not world.answer_one():
            break
    world.check_ends()
    assert len(corrupt) > 3
    assert "make no sense" in caplog.text
    # Of one call the sound drafts are kept.
    assert world.core.totals.accepted_tokens > 0


def test_drafts_of_requests_that_were_not_asked_for_are_ignored() -> None:
    world = World(5, "fixed")
    world.send(submit(0, world.rng))
    world.drain()
    tree = chain(1, 3)
    drafts = [Draft(request_id=name, tree=tree, num_scored=9) for name in ("r0", "nobody")]
    world.handle(DraftDone("good", DraftResult(call_id=1 << 20, drafts=drafts)))
    world.handle(Tick())
    world.check_ends()


def test_an_idle_cell_does_not_call_itself_saturated() -> None:
    """It told the client to come back in a second for ever: there was no load that could have fallen."""
    world = World(1, "flotilla")
    objective = Objective(tpot_ms=8.0)
    hasty = submit(0, world.rng, objective=objective, on_miss="reject", prompt=[1] * 20)
    predicted = world.core.door.forecast.alone(hasty, drafts=True)
    assert predicted.tpot_ms < 8.0, "possible by itself"
    world.send(hasty)
    assert not world.rejected
    world.drain()
    world.check_ends()


@pytest.mark.thorough
def test_an_overload_does_not_fill_the_memory_with_those_who_were_refused() -> None:
    """Each refusal kept its prompt until the time that the client was told to come back at."""
    world = World(1, "autoregressive")
    promises = world.core.door.promises
    promises.most = 500  # an hour has no room for as many as are kept by default
    for number in range(3 * promises.most):
        world.core.handle(RequestArrived(submit(number, world.rng), "a"), world.now)
    assert len(promises) == promises.most
    check_invariants(world.core)


def test_who_was_admitted_is_not_refused_for_an_objective_when_its_cell_is_lost() -> None:
    asked = submit(0, World(1, "fixed").rng, objective=Objective(tpot_ms=8.0), on_miss="reject")
    pending = Pending(asked, [])
    first = pending.next_life("one")
    assert first is not None
    assert first.on_miss == "reject"
    pending.lost()
    second = pending.next_life("two")
    assert second is not None
    assert second.on_miss == "serve"
    assert second.objective == asked.objective


def test_a_queue_takes_somebody() -> None:
    """With `max_waiting: 0` every request was refused, as newcomers pass through the queue."""
    with pytest.raises(ValueError, match="max_waiting"):
        FlotillaConfig.model_validate({"target": {"path": "unused"}, "scheduler": {"max_waiting": 0}})


def test_a_request_preempted_in_the_second_of_two_calls_may_be_deferred_by_it() -> None:
    """The answer to the first call made room by preempting it; that of the second raised."""
    settings = Settings(batching="sep-pipe", micro_batches=3, num_slots=220, drafters=())
    operations = (
        ("submit", 367002),
        ("burst", 343254),
        ("answers", 394431),
        ("forward", 350985),
        ("no_slots", 930774),
        ("answer", 602352),
        ("no_slots", 1310),
    )
    ChaosWorld.run(Schedule(settings, operations))


def test_a_clock_that_is_put_back_does_not_keep_anybody_waiting_for_a_drafter() -> None:
    """Until the clock was where it had been, the drafter was not late."""
    world = World(5, "fixed")
    world.send(submit(0, world.rng, sampling=SamplingParams(temperature=0.0, max_tokens=30)))
    while not any(isinstance(a, DraftDone) and a.result.drafts[0].tree.num_drafted for a in world.answers):
        assert world.answer_one()
    world.answers = [a for a in world.answers if not isinstance(a, DraftDone)]
    world.now -= 1000.0
    world.handle(Tick())
    world.drain()
    world.check_ends()


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(
            Settings(batching="priority", num_slots=165, prefill_chunk=8),
            (("submit", 392920), ("submit", 637324)),
        ),
        Schedule(
            Settings(policy="specserve", batching="stta", num_slots=130),
            (("burst", 634862), ("burst", 392716), ("drain_cell", 201770)),
        ),
    ],
    ids=["priority", "stta"],
)
def test_others_go_on_at_once_when_all_that_were_drafted_for_give_way(schedule: Schedule) -> None:
    """Those whom the batch limit had held back waited for the next tick, and the target with them."""
    ChaosWorld.run(schedule)


def test_a_clock_that_is_put_back_does_not_make_steps_take_negative_times() -> None:
    """They were believed, and never got better: a step counts for four times what is known at most."""
    world = World(5, "autoregressive")
    world.send(submit(0, world.rng, sampling=SamplingParams(temperature=0.0, max_tokens=40)))
    world.answer_one()
    forecast = world.core.door.forecast
    for _ in range(10):
        world.now -= 100.0
        world.answer_one()
    assert forecast.tpot_s(1, drafts=True) > 0.0
    assert forecast.prefill_s(10, 1) > 0.0
    world.drain()
    world.check_ends()
    assert 0.0 < forecast.tpot_s(1, drafts=True) < 1.0


@pytest.mark.parametrize("seed", [153, 272, 388, 455])
def test_a_step_planned_ahead_may_name_who_has_all_its_tokens(seed: int) -> None:
    """The call before brings the last of them; the search's target refused what the real one passes over."""
    _, failure = chaos.attempt(drawn(seed))
    assert failure is None, failure.message


@pytest.mark.parametrize("seed", [2749, 15041])
def test_who_is_forgotten_where_nobody_waits_for_the_answer_is_told_anew(seed: int) -> None:
    """A prompt of which more was cached than was thought ends before a chunk of it that was sent ahead."""
    _, failure = chaos.attempt(drawn(seed))
    assert failure is None, failure.message
