"""Fast switching: caches built while the target verifies, used at the switch, dropped after a wrong guess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from cluster.catching_up import catch_up
from cluster.cell_metrics import CellMetrics
from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.drafter_pool import DrafterPool
from cluster.events import DrafterReady
from cluster.requests import Request
from cluster.stream_messages import Submit
from cluster.switching import READ_WITH_DRAFT
from drafters.messages import Draft, DraftCall, DraftPlan, DraftResult
from engine.sampling_params import SamplingParams
from engine.tree import TokenTree
from selector.lbss import Lbss
from selector.protocol import Outcome, PoolView, RequestView
from tests.cluster.rotating import Rotate
from tests.cluster.simulated import submit
from tests.cluster.test_core import World
from tests.cluster.test_drafter_pool import capabilities


class Directed(Rotate):
    """Assigns and announces what the test says."""

    def __init__(self) -> None:
        self.now: dict[str, str] = {}
        self.next: dict[str, str] = {}

    def assign(self, requests: Sequence[RequestView], pool: PoolView) -> dict[str, str]:
        return {request.request_id: self.now[request.request_id] for request in requests}

    def destination(self, request: RequestView, pool: PoolView) -> str:
        return self.next.get(request.request_id, "")

    def prices(self) -> Mapping[str, float]:
        return {"a": 12.5}


class Scene:
    """A pool of three drafters with requests that are told where to go."""

    def __init__(self, *, max_requests: int = 8, max_tokens: int = 500) -> None:
        self.pool = DrafterPool(CostModel(DEFAULT_PROFILE), max_depth=6)
        for name in ("a", "b", "c"):
            self.pool.add(name, replace(capabilities(), max_tokens=max_tokens), max_requests)
        self.selector = self.pool.selector = Directed()
        self.now = 0.0

    def request(self, name: str, drafter: str, to: str = "", num_prompt: int = 40) -> Request:
        sampling = SamplingParams(temperature=0.0, max_tokens=200)
        message = Submit(request_id=name, prompt=list(range(1, num_prompt + 1)), sampling=sampling)
        request = Request(message, "client", 0.0, 0, output=[1, 2, 3], num_steps=1)
        self.move(request, drafter)
        self.selector.next[name] = to
        return request

    def move(self, request: Request, drafter: str) -> None:
        self.selector.now[request.request_id] = drafter
        self.pool.assign([request], self.now)

    def prepare(self, *requests: Request, idle_s: float = 1.0) -> list[tuple[str, DraftCall]]:
        return self.pool.switching.prepare(requests, self.now, idle_s)

    def answer(self, name: str, call: DraftCall, seconds: float = 0.25, depth: int = 0) -> None:
        tree = TokenTree.chain(3, [4] * depth, [-0.1] * depth)
        drafts = [Draft(request_id=item.request_id, tree=tree) for item in call.items]
        self.pool.answered(name, DraftResult(call_id=call.call_id, drafts=drafts, seconds=seconds), self.now)

    def draft(self, request: Request) -> tuple[str, DraftCall]:
        name = request.drafter
        return name, self.pool.call(name, [self.pool.item(request, DraftPlan(depth=2))], self.now)


def test_a_prepared_switch_drafts_at_once_and_its_reading_counts_as_avoided() -> None:
    scene = Scene()
    request = scene.request("r", "a", to="b")
    [(name, call)] = scene.prepare(request)
    assert name == "b"
    assert call.items[0].plan.depth == 0
    assert call.items[0].spec is not None
    scene.answer(name, call, seconds=0.25)
    request.extend([5, 6])
    scene.now = 1.0
    scene.move(request, "b")
    assert scene.pool.can_draft_now(request)
    sent = scene.draft(request)
    assert sent[1].items[0].tokens.tolist() == [5, 6]
    scene.now = 1.5
    scene.answer(*sent, depth=2)
    totals = scene.pool.switching.totals
    assert (totals.switches, totals.prepared, totals.wasted) == (1, 1, 0)
    assert totals.avoided_s == 0.25
    assert totals.first_drafts == {False: 0, True: 1}
    assert totals.wait_s == {False: 0.0, True: 0.5}


def test_without_preparation_the_drafter_reads_first() -> None:
    scene = Scene()
    request = scene.request("r", "a")
    assert scene.prepare(request) == []
    scene.now = 1.0
    scene.move(request, "b")
    assert not scene.pool.can_draft_now(request)
    [(_, call)] = catch_up(scene.pool, [request], scene.now, 0.0)
    scene.answer("b", call)
    scene.now = 3.0
    scene.answer(*scene.draft(request), depth=1)
    totals = scene.pool.switching.totals
    assert (totals.switches, totals.prepared, totals.wasted, totals.avoided_s) == (1, 0, 0, 0.0)
    assert totals.wait_s == {False: 2.0, True: 0.0}


def test_a_switch_while_the_cache_is_still_being_built_is_not_prepared() -> None:
    scene = Scene()
    request = scene.request("r", "a", to="b")
    [(name, call)] = scene.prepare(request)
    scene.move(request, "b")
    assert not scene.pool.can_draft_now(request)
    assert catch_up(scene.pool, [request], 0.0, 60.0) == [], "it reads already"
    scene.answer(name, call)
    assert scene.pool.can_draft_now(request)
    assert scene.pool.switching.totals.prepared == 0


def test_after_a_wrong_guess_the_drafter_is_told_to_forget() -> None:
    scene = Scene()
    request = scene.request("r", "a", to="b")
    scene.answer(*scene.prepare(request)[0])
    scene.move(request, "c")
    assert scene.pool.switching.totals.wasted == 1
    assert scene.pool.drafters["b"].release == ["r"]
    assert "r" not in scene.pool.drafters["b"].known
    scene.selector.next["r"] = "b"
    [(_, call)] = scene.prepare(request)
    assert call.release == ["r"]
    assert call.items[0].spec is not None, "opened anew"
    scene.answer("b", call)
    scene.selector.next["r"] = "a"  # the selector has thought better of it
    assert [name for name, _ in scene.prepare(request)] == ["a"]
    assert scene.pool.switching.totals.wasted == 2


def test_a_request_that_ends_wastes_what_was_prepared() -> None:
    scene = Scene()
    request = scene.request("r", "a", to="b")
    scene.answer(*scene.prepare(request)[0])
    scene.pool.forget(request)
    assert scene.pool.switching.totals.wasted == 1
    assert scene.pool.drafters["b"].release == ["r"]


def test_a_lost_drafter_takes_what_it_prepared_with_it() -> None:
    scene = Scene()
    request = scene.request("r", "a", to="b")
    [(_, call)] = scene.prepare(request)
    assert scene.pool.lose("b", [request]) == []
    scene.pool.add("b", capabilities(), 8)
    assert scene.pool.answered("b", DraftResult(call_id=call.call_id, drafts=[]), 0.0) is None
    scene.move(request, "b")
    assert not scene.pool.can_draft_now(request)
    assert scene.pool.switching.totals.prepared == 0


@pytest.mark.parametrize("busy", ["outstanding", "full", "others would wait"])
def test_a_busy_drafter_is_left_alone(busy: str) -> None:
    scene = Scene(max_requests=1 if busy == "full" else 8)
    request = scene.request("r", "a", to="b")
    idle_s = 1.0
    other = scene.request("other", "b")
    sent = scene.draft(other)
    if busy != "outstanding":
        scene.answer(*sent, depth=2)
    if busy == "others would wait":
        scene.pool.costs.have_read("b", 40, 40 * 0.1)
    assert scene.prepare(request, idle_s=idle_s) == []
    if busy == "others would wait":
        assert scene.prepare(request, idle_s=60.0)


def test_one_preparation_at_a_time_and_kept_up_to_date() -> None:
    scene = Scene()
    first, second = scene.request("r", "a", to="b"), scene.request("s", "a", to="b")
    third = scene.request("t", "a", to="c")
    [(name, call)] = scene.prepare(first, second, third)
    assert scene.prepare(second, third) == []
    scene.answer(name, call)
    assert scene.prepare(first) == [], "it has read all there is"
    first.extend(range(READ_WITH_DRAFT))
    [(_, call)] = scene.prepare(first)
    assert len(call.items[0].tokens) == READ_WITH_DRAFT
    scene.answer("b", call)
    scene.pool.switching.most_at_once = 2
    assert [name for name, _ in scene.prepare(second, third)] == ["b", "c"]


def test_guesses_that_are_never_right_are_made_less_often() -> None:
    scene = Scene()
    made = 0
    for number in range(200):
        request = scene.request(f"r{number}", "a", to="b")
        request.order = number
        for name, call in scene.prepare(request):
            made += 1
            scene.answer(name, call)
        scene.pool.forget(request)
    assert 40 < made < 80
    assert scene.pool.switching.totals.wasted == made


def test_two_requests_may_change_places_on_full_drafters() -> None:
    scene = Scene(max_requests=1)
    one, two = scene.request("r", "a"), scene.request("s", "b")
    scene.selector.now.update({"r": "b", "s": "a"})
    scene.pool.assign([one, two], 0.0)
    assert (one.drafter, two.drafter) == ("b", "a")
    scene.selector.now.update({"r": "a", "s": "a"})
    scene.pool.assign([one, two], 0.0)
    assert sorted([one.drafter, two.drafter]) == ["", "a"], "no drafter serves more than it has places"


def test_estimates_are_of_the_kind_and_calls_of_the_instance() -> None:
    scene = Scene()
    for name in ("x/0", "x/1"):
        scene.pool.add(name, capabilities(), 8, kind="x", size=7)
    request = scene.request("r", "x/0")
    name, call = scene.draft(request)
    drafts = [Draft(request_id="r", tree=TokenTree.root_only(0), num_scored=50, num_agreed=5)]
    before = scene.pool.acceptance.rate("r", "x")
    scene.pool.answered(name, DraftResult(call_id=call.call_id, drafts=drafts), 0.0)
    assert scene.pool.acceptance.rate("r", "x") < before - 0.1
    assert scene.pool.rate(request) == scene.pool.acceptance.rate("r", "x")
    assert "r" not in scene.pool.drafters["x/1"].known
    scene.move(request, "x/1")
    assert not scene.pool.can_draft_now(request), "another instance has not read it"
    assert scene.pool.rate(request) == scene.pool.acceptance.rate("r", "x")


def test_the_core_prepares_switches_and_metrics_tell_of_them() -> None:
    world = World(3, "fixed")
    world.core.pool.selector = Rotate(every=3)
    world.handle(DrafterReady("poor/1", world.drafters["poor"].capabilities, 6, kind="poor"))
    world.drafters["poor/1"] = world.drafters["poor"].__class__(0.2, world.rng)
    for number in range(6):
        world.send(submit(number, world.rng, sampling=SamplingParams(temperature=0.0, max_tokens=60)))
    world.drain()
    world.check_ends()
    totals = world.core.pool.switching.totals
    assert totals.switches > 10
    assert totals.prepared > 0
    assert set(world.core.totals.verified_by_drafter) == {"good", "poor"}
    text = CellMetrics().render(world.core)
    metrics = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert metrics["flotilla_drafter_switches_total",] == totals.switches
    assert metrics["flotilla_drafter_switches_prepared_total",] == totals.prepared
    assert metrics["flotilla_drafter_switch_first_drafts_total", "true"] == totals.first_drafts[True]
    assert metrics["flotilla_drafter_requests", "poor", "poor/1"] == 0.0


@pytest.mark.parametrize("beta", [1, 2, 4, 8])
def test_every_switch_of_spins_schedule_is_prepared(beta: int) -> None:
    """SPIN, section IV-C: where a request goes next is known before, and its cache is built meanwhile."""
    scene = Scene(max_tokens=10_000)
    scene.pool.selector = Lbss(alpha=16, beta=beta, seed=3)
    sampling = SamplingParams(temperature=0.0, max_tokens=10_000)
    message = Submit(request_id="r", prompt=list(range(1, 41)), sampling=sampling)
    request = Request(message, "client", 0.0, 0, output=[1, 2, 3], num_steps=1)
    for _ in range(150):
        scene.pool.assign([request], scene.now)
        name, call = scene.draft(request)
        scene.answer(name, call, depth=2)
        request.extend([1] * 8)
        request.num_steps += 1
        outcome = Outcome("r", name, 8, 2, {"a": 1.0, "b": 0.5, "c": 2.0}[name])
        scene.pool.observe([outcome])
        for other, reading in scene.prepare(request):
            scene.answer(other, reading)
    totals = scene.pool.switching.totals
    assert totals.switches > 5
    assert totals.prepared == totals.switches
