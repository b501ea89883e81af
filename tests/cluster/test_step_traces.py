"""What a request that asks for a trace is told of its token trees."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from cluster.commits import step_trace
from cluster.events import Action, Emit
from cluster.policies.registry import POLICIES
from cluster.requests import GRAMMAR, Request
from cluster.stream_messages import Speculation, StepTrace, Submit, TokenEvent
from engine.sampling_params import SamplingParams
from engine.tree import TokenTree
from tests.cluster.simulated import submit
from tests.cluster.test_core import World
from verifier.messages import Verdict


class Watched(World):
    """Keeps what is told of every step."""

    events: list[TokenEvent]

    def observe(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Emit):
                self.__dict__.setdefault("events", []).extend(action.events)


def check_tree(trace: StepTrace, before: int, event: TokenEvent) -> None:
    """The parts of a trace agree with each other and with what was committed."""
    size = len(trace.tokens)
    assert len(trace.parents) == len(trace.logps) == size
    assert trace.tokens[0] == before
    assert trace.parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(trace.parents) if node)
    assert trace.verified == sorted(set(trace.verified))
    assert trace.verified[0] == 0
    verified = set(trace.verified)
    assert all(trace.parents[node] in verified for node in trace.verified[1:])
    assert set(trace.accepted) <= verified
    above = [0, *trace.accepted]
    assert [trace.parents[node] for node in trace.accepted] == above[:-1]
    assert [trace.tokens[node] for node in trace.accepted] == event.tokens[: event.num_accepted]
    assert len(trace.accepted) == event.num_accepted
    assert trace.drafter or size == 1 + trace.num_forced


@pytest.mark.parametrize(
    ("policy", "micro_batches"),
    [
        *[(policy, 1) for policy in sorted(POLICIES)],
        # Requests are divided between micro-batches whatever the policy.
        *[
            pytest.param(policy, 2, marks=() if policy in ("adaserve", "fixed") else pytest.mark.thorough)
            for policy in sorted(POLICIES)
        ],
    ],
)
def test_traces_hold_the_accepted_paths_and_change_no_text(policy: str, micro_batches: int) -> None:
    outputs, events = [], []
    for trace in (False, True):
        world = Watched(11, policy, micro_batches, num_slots=260)
        for number in range(12):
            world.send(
                submit(
                    number,
                    random.Random(number),
                    sampling=SamplingParams(temperature=0.0, max_tokens=24),
                    speculation=Speculation(trace=trace),
                )
            )
        world.drain()
        world.check_ends()
        outputs.append(world.output)
        events = world.events
        assert trace or not any(event.trace for event in events)
    assert outputs[0] == outputs[1]
    sizes = []
    for request_id, submitted in world.submitted.items():
        own = [event for event in events if event.request_id == request_id and event.tokens]
        sequence, last_ms = list(submitted.prompt), 0.0
        for step, event in enumerate(own, 1):
            assert event.trace is not None
            check_tree(event.trace, sequence[-1], event)
            assert event.trace.step == step
            assert event.trace.elapsed_ms > last_ms
            last_ms = event.trace.elapsed_ms
            sequence += event.tokens
            sizes.append((len(event.trace.tokens), len(event.trace.verified)))
    drafted, verified = sum(n for n, _ in sizes), sum(n for _, n in sizes)
    assert drafted >= verified >= len(sizes)
    if policy == "adaserve":
        assert drafted > verified > len(sizes), "no tree was ever cut, so the cut was not tested"


def traced_request() -> Request:
    speculation = Speculation(trace=True)
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    request = Request(
        Submit(request_id="r", prompt=[1, 2], sampling=sampling, speculation=speculation), "a", 1.0, 0
    )
    request.drafted_kind = "small"
    return request


#    2 (root) - 10 - 11 - 12
#             \ 20 - 11
TREE = TokenTree.of(
    [2, 10, 20, 11, 11, 12], [-1, 0, 0, 1, 2, 3], [0.0, -0.5, -1.0, -0.75, -1.5, -2.0], [0, 1, 1, 2, 2, 3]
)


def test_nodes_of_a_cut_tree_are_found_among_the_candidates() -> None:
    request = traced_request()
    request.candidates = TREE
    request.tree = TREE.subset(np.array([0, 2, 4], dtype=np.int32))
    trace = step_trace(
        request, Verdict(request_id="r", tokens=[20, 11, 5], num_accepted=2, nodes=[1, 2]), 1.5
    )
    assert trace.tokens == [2, 10, 20, 11, 11, 12]
    assert trace.verified == [0, 2, 4]
    assert trace.accepted == [2, 4]
    assert (trace.drafter, trace.elapsed_ms, trace.num_forced) == ("small", 500.0, 0)


def test_tokens_of_a_grammar_follow_those_drafted() -> None:
    request = traced_request()
    request.candidates = request.tree = TREE
    verdict = Verdict(
        request_id="r",
        tokens=[10, 30, 31, 5],
        num_accepted=1,
        nodes=[1],
        num_forced=3,
        num_forced_accepted=2,
    )
    trace = step_trace(request, verdict, 1.5)
    assert trace.accepted == [1, 6, 7]
    assert (trace.tokens[6:], trace.parents[6:], trace.logps[6:]) == ([30, 31], [1, 6], [-0.5, -0.5])
    assert trace.num_forced == 2
    event = TokenEvent(request_id="r", position=0, tokens=verdict.tokens, drafter=GRAMMAR, num_accepted=3)
    check_tree(trace, 2, event)


def test_a_path_is_cut_where_the_output_ends() -> None:
    request = traced_request()
    request.candidates = request.tree = TREE
    verdict = Verdict(request_id="r", tokens=[10, 11], num_accepted=3, nodes=[1, 3, 5])
    assert step_trace(request, verdict, 1.5).accepted == [1, 3]


def test_candidates_that_the_tree_was_not_cut_from_are_left_out() -> None:
    request = traced_request()
    request.candidates = TREE
    request.tree = TokenTree.chain(2, [40], [-0.1])
    trace = step_trace(request, Verdict(request_id="r", tokens=[40, 5], num_accepted=1, nodes=[1]), 1.5)
    assert (trace.tokens, trace.verified, trace.accepted) == ([2, 40], [0, 1], [1])
