"""Whom the pool lets read what: one exploration at a time, cheap, and heard also when its request is gone."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.cost_model import DEFAULT_PROFILE, CostModel
from cluster.draft_service import DraftService
from cluster.drafter_pool import DrafterPool
from cluster.exploring import EXPLORE_INTERVAL
from cluster.requests import Request
from cluster.stream_messages import Speculation, Submit
from drafters.messages import Draft, DraftCall, DraftItem, DraftPlan, DraftResult
from drafters.model_drafter import ModelDrafter
from drafters.prompt_lookup import PromptLookupDrafter
from drafters.protocol import Capabilities
from engine.hf_runner import HFRunner
from engine.sampling_params import SamplingParams
from engine.tree import TokenTree
from engine.wire import Decoder, encode
from selector.flotilla import RECONSIDER_STEPS
from tests.drafters.tiny import llama

PROMPT = [1, 2, 3, 4, 5]


def capabilities(kind: str = "model") -> Capabilities:
    return Capabilities(
        kind=kind,
        max_depth=8,
        max_width=1,
        has_probabilities=kind == "model",
        needs_prefill=kind == "model",
        vocab_size=100,
        max_tokens=500,
    )


def make_pool(*names: str) -> DrafterPool:
    pool = DrafterPool(CostModel(DEFAULT_PROFILE), max_depth=6)
    for name in names:
        pool.add(name, capabilities(), 8)
    return pool


def finished(
    name: str, speculation: Speculation | None = None, num_output: int = 20, max_tokens: int = 100
) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    submit = Submit(
        request_id=name, prompt=PROMPT, sampling=sampling, speculation=speculation or Speculation()
    )
    return Request(submit, "client", 0.0, 0, output=list(range(num_output)), num_steps=5)


def answer(call: DraftCall, scored: int, agreed: int) -> DraftResult:
    drafts = [
        Draft(request_id=i.request_id, tree=TokenTree.root_only(0), num_scored=scored, num_agreed=agreed)
        for i in call.items
    ]
    return DraftResult(call_id=call.call_id, drafts=drafts)


def end(pool: DrafterPool, request: Request, *, is_busy: bool = False) -> list[tuple[str, DraftCall]]:
    """Serve a request with 17 of 20 tokens right, and end it."""
    pool.assign([request], 0.0)
    pool.acceptance.observe(request.request_id, request.drafter, 20, 17)
    explorations = pool.explorer.final(request, 0.0, is_busy=is_busy)
    pool.forget(request)
    return explorations


def test_a_finished_request_is_read_by_another_drafter_which_then_releases_it() -> None:
    pool = make_pool("a", "b")
    request = finished("r")
    pool.assign([request], 0.0)
    served = request.drafter
    [(name, call)] = end(pool, request)
    assert name != served
    [item] = call.items
    assert item.plan == DraftPlan(depth=0)
    assert item.spec is not None
    assert item.spec.tokens == PROMPT + request.output
    assert not pool.drafters[name].known
    before = pool.acceptance.prior("other", name)[0]
    pool.answered(name, answer(call, 20, 2), 0.0)
    assert pool.acceptance.prior("other", name)[0] < before - 0.05
    other = finished("s")
    pool.assign([other], 0.0)
    other.drafter = name
    assert pool.call(name, [pool.item(other, DraftPlan(depth=1))], 0.0).release == ["r"]


def test_one_exploration_at_a_time() -> None:
    pool = make_pool("a", "b", "c")
    [(name, call)] = end(pool, finished("0"))
    assert not end(pool, finished("1"))
    pool.answered(name, answer(call, 20, 10), 0.0)
    assert end(pool, finished("2"))


def test_a_drafter_lost_while_it_explores_leaves_room_for_another() -> None:
    pool = make_pool("a", "b", "c")
    [(name, _)] = end(pool, finished("0"))
    pool.lose(name, iter(()))
    assert end(pool, finished("1"))


def test_a_new_drafter_is_tried_soon_and_a_poor_one_is_let_be() -> None:
    pool = make_pool("a", "b")
    for number in range(200):
        for name, call in end(pool, finished(str(number))):
            pool.answered(name, answer(call, 20, 8), 0.0)
    settled = pool.explorer.num_explorations
    assert settled < 60
    pool.add("new", capabilities(), 8)
    asked = []
    for number in range(200, 210):
        for name, call in end(pool, finished(str(number))):
            asked.append(name)
            pool.answered(name, answer(call, 20, 20 if name == "new" else 8), 0.0)
    assert asked[0] == "new"
    request = finished("last")
    pool.assign([request], 0.0)
    assert request.drafter == "new"


def test_prompt_lookup_is_tried_though_little_is_expected_of_it() -> None:
    pool = make_pool("a")
    pool.add("lookup", capabilities("prompt_lookup"), 8)
    [(name, _)] = end(pool, finished("0"))
    assert name == "lookup"


def test_a_cell_that_is_never_idle_explores_now_and_then() -> None:
    pool = make_pool("a", "b")
    explored = 0
    for number in range(4 * EXPLORE_INTERVAL):
        for name, call in end(pool, finished(str(number)), is_busy=True):
            pool.answered(name, answer(call, 20, 17), 0.0)
            explored += 1
    assert explored == 4


def test_a_busy_drafter_and_one_the_request_may_not_use_are_left_alone() -> None:
    pool = make_pool("a", "b")
    other = finished("other")
    pool.assign([other], 0.0)
    pool.call(other.drafter, [pool.item(other, DraftPlan(depth=2))], 0.0)
    request = finished("r")
    pool.acceptance.begin("r", PROMPT)
    explorations = pool.explorer.final(request, 0.0)
    assert other.drafter not in [name for name, _ in explorations]
    only = make_pool("a", "b")
    assert not end(only, finished("s", Speculation(drafters=("a",))))
    assert not end(only, finished("t", Speculation(mode="off")))


def test_a_drafter_that_cannot_follow_counts_as_wrong() -> None:
    pool = make_pool("a", "b")
    [(name, call)] = end(pool, finished("0"))
    before = pool.acceptance.prior("other", name)[0]
    pool.answered(name, DraftResult(call_id=call.call_id, drafts=[], unknown=["0"]), 0.0)
    assert pool.acceptance.prior("other", name)[0] < before


@pytest.mark.parametrize("others", [(), ("b",)])
def test_a_request_leaves_a_drafter_that_cannot_follow_it(others: tuple[str, ...]) -> None:
    """It may have fewer tokens, or a shorter context: the request stayed there without drafts to its end."""
    model = llama(vocab_size=50)
    pool, drafter = make_pool("a", *others), ModelDrafter(HFRunner(model, 512))
    request = finished("r", num_output=60)  # of tokens from 0 on
    pool.acceptance.begin("r", PROMPT)
    for name, agreed in (("a", 34), ("b", 28)):
        pool.acceptance.observe("r", name, 40, agreed)
    for _ in range(10 * RECONSIDER_STEPS):
        pool.assign([request], 0.0)
        if request.drafter != "a":
            break
        call = pool.call("a", [pool.item(request, DraftPlan(depth=3))], 0.0)
        pool.answered("a", drafter.draft(call), 0.0)
        request.extend([7])
        request.num_steps += 1
    assert request.drafter == (others or ("a",))[0]
    if not others:
        assert pool.acceptance.evidence("r", "a") == 40, "there is nowhere else to go"


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_running_request_may_move_to_a_drafter_that_proves_better(ends_first: bool) -> None:
    pool = make_pool("a", "b")
    request = finished("r", num_output=8)
    pool.assign([request], 0.0)
    here = request.drafter
    pool.acceptance.observe("r", here, 8, 2)
    [(name, call)] = pool.explorer.running(request, 0.0)
    assert name != here
    assert "r" in pool.drafters[name].known
    assert not pool.explorer.running(request, 0.0)
    if ends_first:
        pool.forget(request)
        before = pool.acceptance.prior("other", name)[0]
        pool.answered(name, answer(call, 20, 20), 0.0)
        assert pool.acceptance.prior("other", name)[0] > before
        assert pool.drafters[name].release == ["r"]
    else:
        pool.answered(name, answer(call, 8, 8), 0.0)
        request.num_steps += RECONSIDER_STEPS
        pool.assign([request], 0.0)
        assert request.drafter == name
        assert pool.num_switches == 1


def test_a_drafter_that_holds_a_running_request_reads_on_and_is_found_once_it_is_good() -> None:
    """It was asked once a request, and one that was bad at the beginning of a long answer stayed away."""
    pool = make_pool("a", "b")
    request = finished("r", num_output=8, max_tokens=400)
    pool.assign([request], 0.0)
    here = request.drafter
    other = "b" if here == "a" else "a"
    read = []
    for _ in range(120):
        pool.acceptance.observe(request.request_id, here, 2, 1)
        for name, call in pool.explorer.running(request, 0.0):
            assert name == other
            [item] = call.items
            num_new = len(item.tokens) if item.spec is None else len(request.output)
            read.append((item.spec is not None, num_new))
            pool.answered(name, answer(call, num_new, 0 if item.spec else num_new), 0.0)
        request.extend([1, 2])
        request.num_steps += 1
        pool.assign([request], 0.0)
        if request.drafter == other:
            break
    assert request.drafter == other
    assert read[0] == (True, 8)
    assert [is_opening for is_opening, _ in read[1:]] == [False] * (len(read) - 1)
    assert sum(num_new for _, num_new in read) <= len(request.output), "each token once"


def test_a_drafter_that_holds_a_request_reads_on_rather_than_another_of_its_kind() -> None:
    pool = make_pool("a")
    for name in ("b1", "b2"):
        pool.add(name, capabilities(), 8, kind="b")
    request = finished("r", num_output=8, max_tokens=400)
    request.drafter = "a"
    pool.assign([request], 0.0)
    pool.drafters["a"].outstanding.clear()
    names = []
    for _ in range(60):
        pool.acceptance.observe(request.request_id, request.drafter, 2, 1)
        for name, call in pool.explorer.running(request, 0.0):
            names.append(name)
            pool.answered(name, answer(call, 8, 4), 0.0)
        request.extend([1, 2])
        request.num_steps += 1
    assert len(names) > 1
    assert len(set(names)) == 1


def test_a_drafter_that_lost_a_request_it_held_is_not_judged_for_that() -> None:
    pool = make_pool("a", "b")
    request = finished("r", num_output=8, max_tokens=400)
    pool.assign([request], 0.0)
    pool.acceptance.observe("r", request.drafter, 8, 2)
    [(name, call)] = pool.explorer.running(request, 0.0)
    pool.answered(name, answer(call, 8, 2), 0.0)
    request.extend(list(range(120)))
    request.num_steps += 7
    [(name, call)] = pool.explorer.running(request, 0.0)
    before = pool.acceptance.evidence("r", name)
    pool.answered(name, DraftResult(call_id=call.call_id, drafts=[], unknown=["r"]), 0.0)
    assert pool.acceptance.evidence("r", name) == before
    request.extend(list(range(60)))
    request.num_steps += 8
    [(_, again)] = pool.explorer.running(request, 0.0)
    assert again.items[0].spec is not None


def test_an_item_of_a_known_request_carries_what_is_new_only() -> None:
    pool = make_pool("a")
    request = finished("r")
    pool.assign([request], 0.0)
    first: DraftItem = pool.item(request, DraftPlan(depth=1))
    request.extend([7])
    second = pool.item(request, DraftPlan(depth=1))
    assert (first.start, second.start) == (0, len(PROMPT) + 20)
    assert second.spec is None
    assert second.tokens.tolist() == [7]


def test_a_drafter_that_keeps_nothing_costs_nothing_to_move_to_under_whatever_name() -> None:
    pool = make_pool("a")
    pool.costs.have_read("a", 400, 0.2)
    assert pool.costs.rebuild_s("a", 400) > 0.0
    pool.lose("a", ())
    pool.add("a", capabilities("prompt_lookup"), 8)
    assert pool.costs.rebuild_s("a", 400) == 0.0


def test_a_drafter_that_failed_in_a_call_releases_its_requests_also_if_they_never_come_again() -> None:
    class Failing(PromptLookupDrafter):
        def _drafts(self, call: DraftCall, begun: Any) -> list[Draft]:
            raise IndexError("a bug")

    pool, drafter = make_pool("a"), Failing(vocab_size=100, max_tokens=500)
    service = DraftService(drafter)
    results: Decoder[DraftResult] = Decoder(DraftResult)
    for number in range(3):
        request = finished(str(number), num_output=1)
        pool.assign([request], 0.0)
        call = pool.call("a", [pool.item(request, DraftPlan(depth=2))], 0.0)
        pool.answered("a", results.decode(service.answer(encode(call))), 0.0)
        assert request.request_id in drafter._held
        pool.forget(request)
    pool.assign([last := finished("last")], 0.0)
    service.answer(encode(pool.call("a", [pool.item(last, DraftPlan(depth=2))], 0.0)))
    assert drafter._held.keys() == {"last"}
    assert not pool.drafters["a"].release
