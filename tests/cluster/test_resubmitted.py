"""Requests that come with output of another life: only what is of this one counts for clocks and metrics."""

from __future__ import annotations

import msgspec
import pytest

from cluster.admission import slack_s, victim
from cluster.batching.slack import ahead_s
from cluster.commits import take_progress
from cluster.config import FlotillaConfig
from cluster.core import SchedulerCore
from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.events import Reject, RequestArrived, VerifierReady
from cluster.forecast import Forecast, Schedule
from cluster.policies.registry import make_policy
from cluster.requests import Request, State
from cluster.stream_messages import Objective, Submit
from engine.sampling_params import SamplingParams
from tests.cluster.simulated import VOCAB, expected_output, submit
from tests.cluster.test_cell_metrics import MeasuredWorld
from verifier.messages import PrefillProgress


def decoding(name: str, order: int, before: int, since: int) -> Request:
    """A request with so many tokens of another life, and so many in this one since second 10."""
    asked = Submit(
        request_id=name,
        prompt=[1, 2, 3],
        sampling=SamplingParams(max_tokens=2000),
        output=[5] * before,
        objective=Objective(tpot_ms=50.0),
    )
    request = Request(asked, "a", 0.0, order, output=[5] * before)
    request.first_token_at = 10.0
    request.extend([5] * since)
    return request


def test_tokens_of_another_life_are_no_slack() -> None:
    late, ahead = decoding("resubmitted", 1, 800, 150), decoding("ahead", 2, 0, 240)
    assert slack_s(late, 20.0, 0.05) < 0 < slack_s(ahead, 20.0, 0.05)
    for request in (late, ahead):
        assert slack_s(request, 20.0, 0.0) == pytest.approx(ahead_s(request, 20.0) + 0.05)
    assert victim([late, ahead], 20.0, 0.05) is ahead


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.4])
@pytest.mark.parametrize("output", [[], [4] * 20])
def test_the_least_a_model_can_reach_does_not_rise_with_load(factor: float, output: list[int]) -> None:
    """Nor is who was begun elsewhere refused for it."""
    config = FlotillaConfig.model_validate({"target": {"path": "unused"}})
    costs = CostModel.corrected(DEFAULT_PROFILE, {"verifier": factor}, {})
    core = SchedulerCore(config, make_policy(config.policy), costs)
    core.handle(VerifierReady(1000, 500, VOCAB), 0.0)
    least_ms = (
        1e3 * min(factor, 1.0) * DEFAULT_PROFILE.target.seconds(1, 1, 0) / (config.policy.max_depth + 1)
    )
    for number, share in enumerate((0.99, 1.01)):
        asked = Submit(
            request_id=f"r{number}",
            prompt=[1, 2, 3],
            output=output,
            sampling=SamplingParams(max_tokens=50),
            objective=Objective(tpot_ms=share * least_ms),
        )
        codes = [
            a.rejection.code for a in core.handle(RequestArrived(asked, "a"), 1.0) if isinstance(a, Reject)
        ]
        assert codes == (["slo_infeasible"] if share < 1.0 and not output else [])


def test_a_first_token_of_another_life_is_no_first_token_here() -> None:
    world = MeasuredWorld(1, "autoregressive")
    whole = submit(0, world.rng, objective=Objective(ttft_ms=100.0, tpot_ms=1000.0))
    expected = expected_output(whole, 160)
    before = expected[: len(expected) // 2]
    again = Submit(
        request_id="r0~2",
        prompt=whole.prompt,
        sampling=whole.sampling,
        objective=whole.objective,
        output=before,
    )
    world.output["r0~2"] = list(before)
    world.accounts.arrived(again)
    world.send(again)
    world.drain()
    assert world.output["r0~2"] == expected
    assert world.value("flotilla_time_to_first_token_seconds_count") == 0
    assert world.value("flotilla_e2e_latency_seconds_count") == 0
    assert world.value("flotilla_slo_requests_total", objective="ttft") == 0
    assert world.value("flotilla_slo_requests_total", objective="tpot", attained="true") == 1
    assert world.value("flotilla_goodput_tokens_total") == len(expected) - len(before)


def test_what_was_waited_elsewhere_counts_for_times_and_objectives() -> None:
    """So it does for what is predicted."""
    world = MeasuredWorld(1, "autoregressive")
    asked = submit(0, world.rng, objective=Objective(ttft_ms=1000.0))
    for name, waited_s in (("r0", 0.0), ("r1", 2.0)):
        sent = msgspec.structs.replace(asked, request_id=name, waited_s=waited_s)
        world.accounts.arrived(sent)
        world.send(sent)
        world.drain()
    (_, here), (_, moved) = world.receipts
    assert here.ttft_ms is not None
    assert here.ttft_ms < 1000.0
    for took in ("queue_ms", "ttft_ms", "e2e_ms"):
        assert 2000.0 <= getattr(moved, took) < 2000.0 + 2 * here.e2e_ms, took
    assert moved.tpot_ms == pytest.approx(here.tpot_ms, rel=0.5)
    assert world.value("flotilla_slo_requests_total", objective="ttft", attained="true") == 1
    assert world.value("flotilla_slo_requests_total", objective="ttft", attained="false") == 1
    assert moved.predicted is not None
    assert moved.predicted.ttft_ms >= 2000.0
    again = msgspec.structs.replace(asked, request_id="r2", waited_s=2.0, on_miss="reject")
    world.accounts.arrived(again)
    world.send(again)
    world.drain()
    assert len(world.receipts) == 3, "nothing else is served: only serving it tells"
    for name, waited_s in (("r3", 0.0), ("r4", 2.0), ("r5", 0.0)):
        world.send(msgspec.structs.replace(asked, request_id=name, waited_s=waited_s, on_miss="reject"))
    assert world.rejected == {"r4": "saturated"}


def test_what_another_life_left_in_the_cache_says_nothing_of_newcomers() -> None:
    """Output found there counted as 100 times the prompt: no prompt was expected to take any time."""
    forecast, newcomer = Forecast(CostModel(DEFAULT_PROFILE), 512, 8), decoding("newcomer", 0, 0, 0).submit
    newcomer = msgspec.structs.replace(newcomer, prompt=[1] * 3000)
    alone = Schedule(0.0, (), (), 1)
    expected = forecast.predict(newcomer, (), alone, drafts=False)
    for number in range(4):
        request = decoding(f"r{number}", number, 400, 0)
        request.state = State.PREFILL_SENT
        found = PrefillProgress(request_id=request.request_id, num_computed=402, num_cached=400)
        assert take_progress(request, found, None) == request.num_cached == request.num_prompt == 3
        request.extend([5])
        forecast.ended(request, "stop")
    assert forecast.predict(newcomer, (), alone, drafts=False).ttft_ms == expected.ttft_ms
