"""What admission keeps books of under overload: promised times, arrival rates and outages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest

from cluster.arrival_rates import MEMORY_S, ArrivalRates
from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.events import Action, Reject
from cluster.forecast import KNOWN_STEPS, Forecast
from cluster.outages import FIRST_S, Outages
from cluster.promises import FAR_SHARE, LATE_S, NEAR_S, NEAR_SHARE, TENANT_SHARE, Promises
from cluster.requests import Request, State
from cluster.stream_messages import Objective, Rejected, Submit, Tenant
from cluster.tier_config import OnMiss
from engine.sampling_params import SamplingParams
from tests.cluster.simulated import submit
from tests.cluster.test_core import World
from verifier.messages import PrefillProgress, Verdict, VerifyResult

OBJECTIVE = Objective(ttft_ms=300.0)


def submitted(number: int, *, tenant: str = "", seed: int = 0, priority: int = 0) -> Submit:
    return Submit(
        request_id=f"r{number}-{seed}",
        prompt=[1, 2, number],
        sampling=SamplingParams(seed=seed, max_tokens=10),
        objective=OBJECTIVE,
        priority=priority,
        tenant=Tenant(tenant),
    )


def told(books: Promises, count: int, work_s: float, now: float = 0.0, *, may_be_near: bool) -> list[float]:
    return [
        books.make(submitted(number), 0.0, work_s, now, may_be_near=may_be_near) for number in range(count)
    ]


def test_each_second_is_told_to_no_more_than_it_has_room_for() -> None:
    """A tenth of a second's work each: five fit into half a second, two into a fifth."""
    books = Promises(100.0)
    times = told(books, 400, 0.1, may_be_near=True)
    promised = [time for time in times if time < 100.0]
    near = [time for time in promised if promised.count(time) > FAR_SHARE / 0.1]
    assert len(near) >= NEAR_SHARE * NEAR_S / 0.1 - 1
    assert max(near) <= 1 + NEAR_S
    far = [time for time in promised if time > 1 + NEAR_S]
    assert max(far.count(time) for time in far) <= FAR_SHARE / 0.1
    assert len(far) > 80
    work = {second: 0.1 * promised.count(second) for second in set(promised)}
    assert all(work[second] <= NEAR_SHARE + 1e-9 for second in work if second <= 1 + NEAR_S)
    assert all(work[second] <= FAR_SHARE + 1e-9 for second in far)
    assert times[-1] == 100.0
    at_the_end = round(FAR_SHARE / 0.1)  # a hundred seconds is also the last time that can be promised
    assert len(books) == len(promised) + at_the_end


def test_slow_cells_give_appointments_seconds_apart() -> None:
    times = told(Promises(3600.0), 5, 2.0, may_be_near=False)
    gaps = [after - before for before, after in pairwise(times)]
    assert min(gaps) >= 2.0 / FAR_SHARE / 2
    assert max(gaps) <= 2.0 / FAR_SHARE


def test_a_promise_is_kept_for_the_same_request_at_its_time_and_once() -> None:
    books = Promises(60.0)
    after_s = books.make(submitted(1), 3.2, 0.1, 10.0, may_be_near=True)
    assert after_s == 4.0  # whole seconds, as the header has
    again = submitted(1, seed=7)
    assert not books.keep(again, 12.0)  # too early: it comes like anybody
    assert not books.keep(submitted(2), 14.0)
    assert not books.keep(submitted(1, tenant="other"), 14.0)
    assert books.keep(again, 14.2)
    assert not books.keep(again, 14.2)
    assert len(books) == 0
    assert not books.is_due("", 14.2)


def test_who_does_not_come_is_forgotten_and_counts_for_less() -> None:
    books = Promises(60.0)
    told(books, 20, FAR_SHARE, may_be_near=False)  # one a second
    expected = books.num_due(lambda _label, _priority: True, 100.0)
    assert expected == 20.0
    books.expire(10.0 + LATE_S + 0.5)
    assert len(books) == 10
    assert books.num_due(lambda _label, _priority: True, 100.0) < 10.0
    books.expire(1000.0)
    assert len(books) == 0
    assert not books._by_identity


def test_only_those_count_that_would_pass() -> None:
    books = Promises(60.0)
    books.make(submitted(1, tenant="a", priority=-1), 0.0, 0.01, 0.0, may_be_near=True)
    books.make(submitted(2, tenant="b", priority=5), 0.0, 0.01, 0.0, may_be_near=True)
    assert books.num_due(lambda label, _: label == "a", 9.0) == 1.0
    assert books.num_due(lambda _, priority: priority > 0, 9.0) == 1.0
    assert books.num_due(lambda *_: True, 0.5) == 0.0


def test_one_tenant_does_not_take_all_of_the_next_seconds() -> None:
    books = Promises(3600.0)
    times = [books.make(submitted(n, tenant="greedy"), 0.0, 0.1, 0.0, may_be_near=True) for n in range(200)]
    assert sum(promise.is_near for promise in books._due) <= TENANT_SHARE * NEAR_SHARE * NEAR_S / 0.1 + 1
    assert max(times) > 60.0
    assert books.make(submitted(0, tenant="other"), 0.0, 0.1, 0.0, may_be_near=True) <= 1 + NEAR_S


def test_whoever_asks_for_little_is_not_told_the_times_of_who_asks_for_much() -> None:
    books = Promises(3600.0)

    def far(number: int, tenant: str) -> float:
        return books.make(submitted(number, tenant=tenant), 0.0, 0.1, 0.0, may_be_near=False)

    greedy = [far(number, "greedy") for number in range(400)]
    assert max(greedy) >= 400 * 0.1 / (TENANT_SHARE * FAR_SHARE) - 1
    assert [far(number, "other") for number in range(5)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert far(1000, "third") > 5.0
    work = {second: 0.1 * sum(promise.at == second for promise in books._due) for second in range(1, 400)}
    assert max(work.values()) <= FAR_SHARE + 1e-9


def test_promises_of_next_to_no_work_are_forgotten_one_by_one() -> None:
    """The second had no account to be taken from: found by `flotilla bench chaos`."""
    books = Promises(60.0)
    told(books, 3, 1e-10, may_be_near=True)
    books.expire(10.0)
    assert len(books) == 0
    assert not books._near_s


def test_promises_are_bounded() -> None:
    books = Promises(60.0, most=10)
    assert told(books, 30, 0.001, may_be_near=False)[10:] == [60.0] * 20
    assert len(books) == 10


def test_rates_follow_arrivals_and_fade() -> None:
    rates = ArrivalRates()
    for number in range(1000):
        rates.took("a", 0, 7.0, number / 20)
    (flow,) = rates.flows(50.0)
    assert (flow.label, flow.priority, flow.charge) == ("a", 0, 7.0)
    assert flow.rate == pytest.approx(20.0, rel=0.05)
    (flow,) = rates.flows(50.0 + 3 * MEMORY_S)
    assert flow.rate == pytest.approx(1.0, rel=0.1)


def test_an_outage_is_expected_to_last_as_long_as_those_before() -> None:
    outages = Outages()
    assert outages.left_s(0.0) == 0.0
    outages.lost(10.0)
    assert outages.left_s(11.0) == FIRST_S - 1.0
    outages.lost(12.0)  # another rank of it
    outages.ready(22.0)
    assert outages.left_s(23.0) == 0.0
    for number in range(1, 60):
        outages.lost(100.0 * number)
        outages.ready(100.0 * number + 12.0)
    outages.lost(10000.0)
    assert outages.left_s(10002.0) == pytest.approx(10.0, abs=0.1)
    assert outages.left_s(10036.0) == pytest.approx(12.0, abs=0.1)  # overdue by 24 s: half of that again


class Refusing(World):
    """Four requests decode without drafts, a step taking a few milliseconds; keeps what clients are told."""

    def __init__(self) -> None:
        self.told: dict[str, Rejected] = {}
        super().__init__(1, "autoregressive")
        for number in range(4):
            self.serve(number, 100)
        for _ in range(60):
            self.answer_one()

    def observe(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Reject):
                self.told[action.rejection.request_id] = action.rejection

    def serve(self, number: int, max_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.send(submit(number, self.rng, sampling=sampling))

    def ask(self, number: int, at: float, on_miss: OnMiss = "reject") -> Rejected | None:
        """Ask for a first token within 300 ms; what is told if that is refused."""
        self.now = at
        request = msgspec.structs.replace(
            submitted(number), request_id=f"r{number} at {at:.1f}", on_miss=on_miss
        )
        self.send(request)
        return self.told.get(request.request_id)

    def retry_after_s(self, number: int, at: float) -> float:
        told = self.ask(number, at)
        assert told is not None
        assert told.code == "saturated"
        assert told.retry_after_s is not None
        return told.retry_after_s

    def until_told(self, number: int) -> None:
        """The target is away when a request comes, and back before the time that it was told."""
        self.lose("verifier")
        lost = self.now
        told_s = self.retry_after_s(number, lost)
        self.now = lost + 4.0
        self.start_target()
        self.drain()
        self.now = lost + told_s


def test_while_the_target_is_away_clients_are_told_when_it_will_be_back() -> None:
    world = Refusing()
    world.lose("verifier")
    lost = world.now
    assert world.retry_after_s(10, lost) == FIRST_S
    assert world.retry_after_s(11, lost + 2.0) == FIRST_S - 2.0
    assert world.ask(12, lost + 2.0, "serve") is None
    assert len(world.core.waiting) == 5
    for number in range(20, 45):  # more than can run at once, with half of a second's work
        world.serve(number, 60)
    assert world.retry_after_s(13, lost + 2.2) == FIRST_S - 1.0
    # It is overdue: half of the time that it is late.
    assert world.retry_after_s(14, lost + FIRST_S + 10.0) > 5.0
    world.now = lost + FIRST_S + 12.0
    world.start_target()
    world.drain()
    assert not world.core.requests
    # The next is expected to last longer than the first was.
    for number in range(50, 54):
        world.serve(number, 60)
    world.lose("verifier")
    assert world.retry_after_s(15, world.now) == FIRST_S + 12.0 / 4


def test_whoever_comes_back_when_the_target_does_is_taken() -> None:
    world = Refusing()
    world.until_told(10)
    assert world.ask(10, world.now) is None
    assert len(world.core.door.promises) == 0
    world.drain()
    assert sum(name.startswith("r10") for name in world.reason) == 1


def test_a_cell_with_nobody_in_it_says_when_its_target_will_be_back() -> None:
    world = Refusing()
    world.drain()
    world.lose("verifier")
    told = world.ask(10, world.now + 1.0)
    assert told is not None
    assert told.code == "not_ready"
    assert told.retry_after_s == pytest.approx(FIRST_S - 1.0, abs=0.01)


def test_an_outage_does_not_change_what_speeds_are_expected() -> None:
    """Its time was taken for that of a step."""
    world = Refusing()
    forecast = world.core.door.forecast
    before_s = [forecast.tpot_s(number, drafts=False) for number in (4, 8)]
    prompts_s = [forecast.prefill_s(24, number) for number in (0, 4)]
    world.lose("verifier")
    world.now += 8.0
    world.start_target()
    for _ in range(20):
        world.answer_one()
        assert [forecast.tpot_s(number, drafts=False) for number in (4, 8)] == pytest.approx(
            before_s, rel=0.05
        )
        # The steps after it are as short as those before, so prompts are not expected to take longer.
        for number, prompt_s in zip((0, 4), prompts_s, strict=True):
            assert forecast.prefill_s(24, number) < 1.001 * prompt_s


def test_whoever_comes_as_told_is_as_urgent_as_any() -> None:
    world = Refusing()
    world.until_told(10)
    asked = msgspec.structs.replace(submitted(10), request_id="again", on_miss="reject", priority=3)
    unasked = msgspec.structs.replace(submitted(11), request_id="newcomer", on_miss="reject", priority=3)
    world.send(asked)
    world.send(unasked)
    priorities = {name: request.submit.priority for name, request in world.core.requests.items()}
    assert priorities == {"again": 0, "newcomer": 3}


def test_headroom_grows_when_those_are_late_who_were_predicted_to_be_on_time() -> None:
    world = Refusing()
    door = world.core.door
    before = door.headroom.value(world.now)
    assert world.ask(10, world.now) is None
    world.now += 5.0
    world.drain()
    assert door.headroom.value(world.now) > before
    after = door.headroom.value(world.now)
    assert world.ask(11, world.now, "serve") is None
    world.drain()
    assert door.headroom.value(world.now) < after


def resuming(number: int, *, output: int, first_at: float) -> Request:
    """Lost its place in the target after some tokens; all of its sequence is being computed again."""
    request = Request(submitted(number), "client", 0.0, number)
    request.extend([1] * output)
    request.state = State.PREFILL_SENT
    request.first_chunk_at = request.first_token_at = request.last_token_at = first_at
    request.is_resuming = True
    return request


def answer(*, decoding: Sequence[Request] = (), computed: Sequence[Request] = ()) -> VerifyResult:
    """Of a step: a token each, and whole prompts."""
    return VerifyResult(
        call_id=0,
        verdicts=[Verdict(request_id=request.request_id, tokens=[1]) for request in decoding],
        prefills=[
            PrefillProgress(
                request_id=request.request_id,
                num_computed=request.num_tokens - 1,
                verdict=Verdict(request_id=request.request_id, tokens=[1]),
            )
            for request in computed
        ],
    )


def test_prompts_computed_again_count_as_prompts_and_not_as_decoding() -> None:
    forecast = Forecast(CostModel(DEFAULT_PROFILE), 512, 8)
    decoding = Request(submitted(0), "client", 0.0, 0)
    decoding.state, decoding.first_token_at = State.VERIFYING, 0.0
    again = [resuming(number, output=100, first_at=0.0) for number in (1, 2, 3)]
    idle_s = forecast.prefill_s(300, 1)
    now = 0.0
    for step in range(30):
        computed = again if step % 3 == 2 else ()
        answered = answer(decoding=[decoding], computed=computed)
        # A step with prompts takes twice as long as the cost model says.
        took_s = 2.0 * idle_s if computed else 0.02
        now += took_s
        forecast.verified(answered, [decoding, *computed], now)
    # One decodes in all steps: no other load was seen, and the prompts' slowness is theirs.
    assert list(forecast._paces) == [1]
    assert forecast._paces[1].num_committed.value == pytest.approx(1.0)
    assert forecast._paces[1].step_s.seen >= KNOWN_STEPS
    assert forecast.prefill_s(300, 1) > 1.3 * idle_s


def test_what_a_request_gets_by_itself_is_not_judged_by_steps_full_of_prompts() -> None:
    """A cell in overload told hundreds of clients that nothing would ever meet their objectives."""
    forecast = Forecast(CostModel(DEFAULT_PROFILE), 512, 8)
    decoding = Request(submitted(0), "client", 0.0, 0)
    decoding.state, decoding.first_token_at = State.VERIFYING, 0.0
    before = forecast.alone(submitted(1), drafts=True)
    for step in range(30):
        forecast.verified(answer(decoding=[decoding]), [decoding], 0.5 * step)
    assert forecast.tpot_s(1, drafts=True) == pytest.approx(0.5, rel=0.05)
    alone = forecast.alone(submitted(1), drafts=True)
    assert alone.tpot_ms <= 2.0 * before.tpot_ms < 500.0


def test_a_load_is_not_judged_by_a_first_step_that_stalled() -> None:
    """As where something is compiled for it: whom nobody is let join any more never learns better."""
    forecast = Forecast(CostModel(DEFAULT_PROFILE), 512, 8)
    decoding = Request(submitted(0), "client", 0.0, 0)
    decoding.state, decoding.first_token_at = State.VERIFYING, 0.0
    for now in (1.0, *(31.0 + 0.01 * step for step in range(2 * KNOWN_STEPS))):
        forecast.verified(answer(decoding=[decoding]), [decoding], now)
    assert 0.01 < forecast.tpot_s(1, drafts=True) < 0.02


def test_slow_prompts_of_the_past_do_not_make_an_objective_impossible() -> None:
    """A cell refused for ever what it could do: nobody was served, and so it learned nothing any more."""
    forecast = Forecast(CostModel(DEFAULT_PROFILE), 512, 8)
    before = forecast.alone(submitted(1), drafts=False)
    for step in range(20):
        made = Request(submitted(step), "client", 0.0, step)
        made.state, made.first_chunk_at = State.PREFILL_SENT, float(step)
        forecast.idle()
        forecast.verified(answer(computed=[made]), [made], step + 0.5)
    assert forecast.prefill_s(3, 0) > 0.1 > 1e-3 * before.ttft_ms
    alone = forecast.alone(submitted(1), drafts=False)
    assert (alone.ttft_ms, alone.e2e_ms) == pytest.approx((before.ttft_ms, before.e2e_ms))


def test_the_first_prompts_after_an_outage_say_nothing_about_speed() -> None:
    """When they were begun again is not known: their first chunks were sent before it."""
    forecast = Forecast(CostModel(DEFAULT_PROFILE), 512, 8)
    again = [resuming(number, output=100, first_at=1.0) for number in (1, 2, 3)]
    before_s = forecast.prefill_s(300, 0)
    forecast.idle()
    forecast.verified(answer(computed=again), again, 60.0)
    assert forecast.prefill_s(300, 0) == before_s
    forecast.verified(answer(computed=again), again, 60.0 + 2.0 * before_s)
    assert before_s < forecast.prefill_s(300, 0) <= 2.0 * before_s
