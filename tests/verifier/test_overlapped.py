"""Calls that are begun while another is computed: outputs are those of plain decoding, and slots add up."""

from __future__ import annotations

import random
from unittest import mock

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from engine.devices import Stopwatch
from engine.sampling_params import SamplingParams
from tests.examples import examples
from tests.verifier.ahead import Scheduler, simple
from tests.verifier.target import Client, spec_of
from tests.verifier.test_lossless import TARGET, params, prompts
from verifier.begun import Begun
from verifier.messages import PrefillItem, VerifyCall, VerifyItem, VerifyResult
from verifier.overlapped import OverlappedCalls
from verifier.verifier import Verifier

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def serve(calls: OverlappedCalls, scheduler: Scheduler) -> None:
    for _ in range(2000):
        call = scheduler.next()
        if call is None:
            return
        scheduler.take(calls.answer(call, scheduler.waiting))
    raise AssertionError("no end in sight")


@examples(50, suppress_health_check=list(HealthCheck))
@given(
    requests=st.lists(st.tuples(prompts, simple | simple | params), min_size=1, max_size=5),
    num_slots=st.sampled_from([150, 600]),
    runner=st.sampled_from(["hf", "lean", "captured"]),
    leaving=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**32),
)
def test_any_schedule_equals_plain_decoding(
    requests: list[tuple[list[int], SamplingParams]], num_slots: int, runner: str, leaving: float, seed: int
) -> None:
    model = TARGET.runner(num_slots, lean=runner == "lean", captured=runner == "captured")
    verifier = Verifier(model, overlaps=True)
    clients = []
    for i, (prompt, sampling) in enumerate(requests):
        spec = spec_of(f"r{i}", prompt, sampling)
        expected, gaps = TARGET.decode(spec)
        assume(min(gaps) > 1e-4)
        clients.append(Client(spec, expected))
    calls = OverlappedCalls(verifier)
    serve(calls, Scheduler(clients, random.Random(seed), leaving))
    assert [client.output for client in clients] == [client.expected for client in clients]
    calls.forget_all(with_prefixes=True)
    assert verifier.free_slots == num_slots
    verifier._table._cache.check_invariants()


def started(*names: str, params: SamplingParams = GREEDY) -> tuple[Verifier, dict[str, list[int]]]:
    """A verifier that overlaps, with a request of each name at its first token; what plain decoding says."""
    verifier = Verifier(TARGET.runner(), overlaps=True)
    specs = [spec_of(name, [7, 3 + i, 11], params) for i, name in enumerate(names)]
    prefill = [PrefillItem(request_id=spec.request_id, num_tokens=9, spec=spec) for spec in specs]
    verifier.step(VerifyCall(call_id=0, prefill=prefill))
    return verifier, {spec.request_id: TARGET.decode(spec)[0] for spec in specs}


def plain(call_id: int, *names: str, release: tuple[str, ...] = ()) -> VerifyCall:
    items = [VerifyItem(request_id=name) for name in names]
    return VerifyCall(call_id=call_id, verify=items, release=list(release))


def tokens_of(result: VerifyResult) -> dict[str, list[int]]:
    return {verdict.request_id: verdict.tokens for verdict in result.verdicts}


def test_the_next_step_is_begun_first() -> None:
    verifier, expected = started("a", "b", "c")
    order: list[str] = []
    begin, finish = verifier.begin_following, verifier.finish

    def begun(call: VerifyCall, before: Begun) -> Begun | None:
        order.append(f"begin {call.call_id}")
        return begin(call, before)

    def finished(begun: Begun) -> VerifyResult:
        order.append(f"finish {begun.call.call_id}")
        return finish(begun)

    steps = [plain(1, "a", "b", "c"), plain(2, "c", "a"), plain(3, "a", release=("b", "c"))]
    calls, found = OverlappedCalls(verifier), []
    with mock.patch.multiple(verifier, begin_following=begun, finish=finished):
        for i, step in enumerate(steps):
            found.append(calls.answer(step, lambda i=i: steps[i + 1] if i < 2 else None))
    assert order == ["begin 2", "finish 1", "begin 3", "finish 2", "finish 3"]
    assert tokens_of(found[0]) == {name: tokens[1:2] for name, tokens in expected.items()}
    assert tokens_of(found[1]) == {name: expected[name][2:3] for name in ("c", "a")}
    assert tokens_of(found[2]) == {"a": expected["a"][3:4]}
    assert "a" in verifier
    assert "b" not in verifier
    assert "c" not in verifier
    verifier._table._cache.check_invariants()


def test_free_slots_are_those_that_the_next_call_finds() -> None:
    sequential, _ = started("a", "b")
    overlapping, _ = started("a", "b")
    calls = OverlappedCalls(overlapping)
    following = plain(2, "a", release=("b",))
    found = [calls.answer(plain(1, "a", "b"), lambda: following), calls.answer(following, lambda: None)]
    expected = [sequential.step(plain(1, "a", "b")), sequential.step(following)]
    assert [result.free_slots for result in found] == [result.free_slots for result in expected]
    assert [result.digest for result in found] == [result.digest for result in expected]
    assert all(0 < result.forward_seconds <= result.seconds for result in found[:1])


@pytest.mark.parametrize(
    ("params", "next_call"),
    [
        (SamplingParams(temperature=0.0, max_tokens=12, logprobs=1), plain(2, "a")),  # read its logits
        (SamplingParams(temperature=0.0, max_tokens=12, presence_penalty=1.0), plain(2, "a")),
        (SamplingParams(temperature=0.0, max_tokens=2), plain(2, "a")),  # ends with the answer
        (GREEDY, VerifyCall(call_id=2, verify=[VerifyItem(request_id="a"), VerifyItem(request_id="a")])),
        (GREEDY, plain(2, "a", "nobody")),
        (GREEDY, VerifyCall(call_id=2, prefill=[PrefillItem(request_id="a", num_tokens=1)])),
    ],
)
def test_what_needs_the_answer_waits_for_it(params: SamplingParams, next_call: VerifyCall) -> None:
    verifier, expected = started("a", "b", params=params)
    begun = verifier.begin(plain(1, "a", "b"))
    held = verifier.free_slots
    assert verifier.begin_following(next_call, begun) is None
    assert verifier.free_slots == held
    assert tokens_of(verifier.finish(begun)) == {name: tokens[1:2] for name, tokens in expected.items()}


@pytest.mark.parametrize("known", [0, 32], ids=["nothing cached", "the beginning cached"])
@pytest.mark.parametrize("shared", [15, 16, 40, 70])
def test_a_prompt_is_opened_before_the_answer_to_one_that_it_shares_nothing_more_with(
    known: int, shared: int
) -> None:
    """Whatever is begun early, a request finds as much of its prompt cached as it would afterwards."""
    text = [(7 * i + 3) % 60 for i in range(70)]
    specs = [spec_of("a", text, GREEDY), spec_of("b", [*text[:shared], 60, *text[shared + 1 :]], GREEDY)]
    calls = [
        VerifyCall(call_id=i, prefill=[PrefillItem(request_id=spec.request_id, num_tokens=99, spec=spec)])
        for i, spec in enumerate(specs)
    ]
    found = []
    for overlaps in (False, True):
        verifier = Verifier(TARGET.runner(), overlaps=overlaps)
        if known:
            spec = spec_of("before", text[: known + 3], GREEDY)
            opened = PrefillItem(request_id="before", num_tokens=99, spec=spec)
            verifier.step(VerifyCall(call_id=9, prefill=[opened], release=[]))
        overlapped = OverlappedCalls(verifier)
        answers = [overlapped.answer(calls[0], lambda: calls[1])]
        is_begun = overlapped.has_begun
        answers.append(overlapped.answer(calls[1], lambda: None))
        found.append([(answer.prefills[0].num_cached, answer.digest) for answer in answers])
    assert found[0] == found[1]
    cached = min(shared, 69) // 16 * 16
    assert found[0][1][0] == cached
    assert is_begun == (cached <= known)


def test_the_call_after_a_part_of_a_prompt_is_waited_for_while_that_is_computed() -> None:
    """Nothing is decided at the end of such a part, and what it takes is known only then."""
    verifier = Verifier(TARGET.runner(), overlaps=True)
    spec = spec_of("a", list(range(40)), GREEDY)
    calls = [
        VerifyCall(call_id=0, prefill=[PrefillItem(request_id="a", num_tokens=20, spec=spec)]),
        VerifyCall(call_id=1, prefill=[PrefillItem(request_id="a", num_tokens=20)]),
    ]
    coming = iter([None, None, calls[1]])
    overlapped = OverlappedCalls(verifier)
    with mock.patch.object(Stopwatch, "has_stopped", False):  # as of a GPU
        overlapped.answer(calls[0], lambda: next(coming))
    assert overlapped.has_begun
    (progress,) = overlapped.answer(calls[1], lambda: None).prefills
    assert progress.verdict is not None
    assert progress.verdict.tokens == TARGET.decode(spec)[0][:1]


def test_without_slots_it_waits() -> None:
    runner = TARGET.runner(5)
    verifier = Verifier(runner, overlaps=True, prefix_sharing=False)
    spec = spec_of("a", [1, 2, 3, 4], GREEDY)
    verifier.step(VerifyCall(call_id=0, prefill=[PrefillItem(request_id="a", num_tokens=9, spec=spec)]))
    begun = verifier.begin(plain(1, "a"))
    assert verifier.free_slots == 0
    assert verifier.begin_following(plain(2, "a"), begun) is None
    assert len(verifier.finish(begun).verdicts) == 1


def test_one_call_at_most_is_ahead() -> None:
    verifier, _ = started("a")
    begun = verifier.begin(plain(1, "a"))
    following = verifier.begin_following(plain(2, "a"), begun)
    assert following is not None
    assert verifier.begin_following(plain(3, "a"), begun) is None
    verifier.finish(begun)
    verifier.finish(following)


def test_what_a_lost_scheduler_sent_ahead_is_for_nobody() -> None:
    """Another one begins anew, and its call is not the one that was begun."""
    verifier, expected = started("a", "b")
    calls = OverlappedCalls(verifier)
    calls.answer(plain(1, "a", "b"), lambda: plain(2, "a", "b"))
    calls.forget_all(with_prefixes=False)
    assert "a" not in verifier
    spec = spec_of("a", [7, 3, 11], GREEDY)
    prefill = [PrefillItem(request_id="a", num_tokens=9, spec=spec)]
    result = calls.answer(VerifyCall(call_id=1, prefill=prefill), lambda: None)
    assert result.prefills[0].verdict is not None
    assert result.prefills[0].verdict.tokens == expected["a"][:1]
    calls.answer(plain(2, "a"), lambda: plain(3, "a"))
    assert tokens_of(calls.answer(plain(9, "a"), lambda: None)) == {"a": expected["a"][3:4]}


def test_a_forward_that_fails_leaves_requests_as_they_were() -> None:
    verifier, expected = started("a")
    begun = verifier.begin(plain(1, "a"))

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with mock.patch.object(verifier._runner, "forward_rows", fail), pytest.raises(RuntimeError):
        verifier.begin_following(plain(2, "a"), begun)
    assert tokens_of(verifier.finish(begun)) == {"a": expected["a"][1:2]}
    assert tokens_of(verifier.step(plain(2, "a"))) == {"a": expected["a"][2:3]}
    verifier._table._cache.check_invariants()


def test_a_call_that_fails_has_released_whom_it_named() -> None:
    """It is not begun again, and the scheduler names nobody twice."""
    verifier, _ = started("a", "b")
    begun = verifier.begin(plain(1, "a", "b"))

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with mock.patch.object(verifier._runner, "forward_rows", fail), pytest.raises(RuntimeError):
        verifier.begin_following(plain(2, "a", release=("b",)), begun)
    verifier.finish(begun)
    assert "b" not in verifier
    assert "a" in verifier
    verifier._table._cache.check_invariants()


def test_a_verifier_that_does_not_overlap_never_asks() -> None:
    verifier = Verifier(TARGET.runner())
    spec = spec_of("a", [7, 3, 11], GREEDY)

    def waiting() -> VerifyCall | None:
        raise AssertionError("asked")

    prefill = [PrefillItem(request_id="a", num_tokens=9, spec=spec)]
    OverlappedCalls(verifier).answer(VerifyCall(call_id=0, prefill=prefill), waiting)
