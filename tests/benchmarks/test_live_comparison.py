"""What becomes of an answer is named rightly: by construction, against every way to damage a sequence."""

from __future__ import annotations

import json

from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.live_client import Attempt, Choice, Delivery, LiveClient
from benchmarks.live_comparison import Comparison, compare_choices, compare_tokens, is_beginning
from benchmarks.live_requests import LiveRequest, mixed_requests
from benchmarks.live_ties import explain_differences

# No token comes twice, so that a damage can be told from its result in one way only.
DISTINCT = st.lists(st.integers(0, 200), min_size=1, max_size=24, unique=True)


@given(DISTINCT, st.data())
def test_a_run_that_comes_twice_is_duplicated(tokens: list[int], data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(tokens) - 1))
    end = data.draw(st.integers(begin + 1, len(tokens)))
    assert compare_tokens(tokens, [*tokens[:end], *tokens[begin:end], *tokens[end:]]) == "duplicated"


@given(DISTINCT, st.data())
def test_a_run_that_is_left_out_is_missing(tokens: list[int], data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(tokens) - 1))
    end = data.draw(st.integers(begin + 1, len(tokens)))
    assert compare_tokens(tokens, tokens[:begin] + tokens[end:]) == "missing"


@given(DISTINCT, st.data())
def test_another_token_differs_whatever_its_place(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    assert compare_tokens(tokens, [*tokens[:at], 999, *tokens[at + 1 :]]) == "differing"
    assert compare_tokens(tokens, [*tokens[:at], 999, *tokens[at:]]) == "differing"
    assert compare_tokens(tokens, list(tokens)) == "same"


def test_a_token_too_few_and_another_wrong_is_no_gap() -> None:
    assert compare_tokens([1, 2, 3, 4], [1, 9, 4]) == "differing"
    assert compare_tokens([1, 2], [1, 2, 1, 9]) == "differing"
    assert compare_tokens([], [5]) == "differing"
    # A text of one token again and again: one more of it can only be told by the length.
    assert compare_tokens([7, 7, 7], [7, 7, 7, 7]) == "duplicated"


def test_texts_ends_and_choices_count_besides_tokens() -> None:
    right = {0: Choice([1, 2], "ab", "stop"), 1: Choice([3], "c", "length")}
    assert compare_choices(right, {0: Choice([1, 2], "ab", "stop"), 1: Choice([3], "c", "length")}) == "same"
    assert compare_choices(right, {0: right[0], 1: Choice([3], "c", "stop")}) == "differing"
    assert compare_choices(right, {0: Choice([1, 2], "aab", "stop"), 1: right[1]}) == "differing"
    assert compare_choices(right, {0: right[0]}) == "missing"
    assert compare_choices(right, {0: right[0], 1: Choice([3, 3], "cc", "length")}) == "duplicated"


def test_what_came_before_a_break_must_be_a_beginning() -> None:
    right = {0: Choice([1, 2, 3], "abc", "stop")}
    assert is_beginning(right, {})
    assert is_beginning(right, {0: Choice([1, 2], "ab")})
    assert not is_beginning(right, {0: Choice([2], "b")})
    assert not is_beginning(right, {0: Choice([1], "b")})
    assert not is_beginning(right, {1: Choice([1], "a")})


def request() -> LiveRequest:
    return mixed_requests(3, 0, 16)[0]


def delivery(*attempts: Attempt) -> Delivery:
    return Delivery(request(), "id", list(attempts))


def test_what_happened_is_counted_once_each() -> None:
    right = {0: Choice([1, 2], "ab", "stop")}
    comparison = Comparison({request().index: right})
    whole = Attempt(2.0, 3.0, "answered", {0: Choice([1, 2], "ab", "stop")})
    early = Attempt(0.0, 0.1, "refused", code="queue_full", retry_after_s=2.0)
    comparison.add(delivery(early, early, whole))
    comparison.add(delivery(Attempt(0.0, 0.1, "broken", {0: Choice([1], "a")}), whole))
    comparison.add(delivery(Attempt(0.0, 0.1, "broken", {0: Choice([2], "b")}), whole))
    comparison.add(delivery(Attempt(0.0, 0.1, "failed", error="HTTP 500")))
    comparison.add(delivery(Attempt(0.0, 0.1, "answered", {0: Choice([1, 1, 2], "aab", "stop")})))
    # Refused to the end is turned away; refused again after it was accepted, or may have been, is lost.
    comparison.add(delivery(early, early))
    comparison.add(delivery(early, Attempt(0.0, 0.1, "broken"), early))
    found = comparison.summary()
    assert (found["requests"], found["same"], found["lost"], found["duplicated"]) == (7, 3, 2, 1)
    assert (found["refused"], found["broken"], found["broken_in_their_midst"]) == (6, 3, 2)
    assert found["turned_away"] == 1
    assert found["refusals"] == {"queue_full, 2 s": 6}
    assert found["broken_with_a_wrong_beginning"] == 1
    assert found["lost_requests"][0]["attempts"][0]["error"] == "HTTP 500"
    assert found["differing_requests"][0]["verdict"] == "duplicated"


async def test_who_is_refused_until_it_has_no_patience_left_is_turned_away_and_not_lost() -> None:
    async def models(asked: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def refuse(asked: web.Request) -> web.Response:
        return web.json_response({"error": {"code": "queue_full"}}, status=429, headers={"Retry-After": "60"})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post(request().path, refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    comparison = Comparison({request().index: {0: Choice([1], "a", "stop")}})
    async with LiveClient(f"http://{host}:{port}", give_up_s=5.0) as client:
        comparison.add(await client.ask(request(), "id"))
    await runner.cleanup()
    found = comparison.summary()
    assert (found["turned_away"], found["lost"], found["refused"]) == (1, 0, 1)


async def test_tokens_that_come_again_after_a_break_are_no_throughput() -> None:
    asked = next(one for one in mixed_requests(14, 0, 16) if one.is_stream)
    num_asked = 0

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def answer(_: web.Request) -> web.Response:
        """Breaks after two pieces the first time; then begins anew, as an answer that is kept for its key."""
        nonlocal num_asked
        num_asked += 1
        chunks = [{"choices": [{"index": 0, "token_ids": [10 * i, 10 * i + 1]}]} for i in range(4)]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        return web.Response(text="".join(lines[:2] if num_asked == 1 else [*lines, "data: [DONE]\n\n"]))

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post(asked.path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    arrived: list[int] = []
    url = f"http://{host}:{port}"
    async with LiveClient(url, give_up_s=5.0, on_tokens=lambda at, tokens: arrived.append(tokens)) as client:
        delivery = await client.ask(asked, "id")
    await runner.cleanup()
    assert [attempt.end for attempt in delivery.attempts] == ["broken", "answered"]
    assert len(delivery.last.choices[0].tokens) == 8
    assert arrived == [2, 2, 2, 2]
    # When an attempt's first tokens came counts whether they are new or not.
    assert len(delivery.last.arrivals) == 4


def test_the_mixed_requests_come_in_all_classes_modes_and_both_ways() -> None:
    requests = mixed_requests(84, 3, 64)
    modes = {one.mode for one in requests}
    assert {(one.mode, one.is_stream) for one in requests} == {(m, s) for m in modes for s in (True, False)}
    assert {one.domain for one in requests} == {"code", "chat", "summary"}
    assert len({one.seed for one in requests}) == 84
    assert all(one.max_tokens <= 64 for one in requests)
    assert [one.body("m") for one in mixed_requests(84, 3, 64)] == [one.body("m") for one in requests]
    assert [one.body("m") for one in mixed_requests(84, 4, 64)] != [one.body("m") for one in requests]


def test_another_text_of_the_same_tokens_is_no_near_tie() -> None:
    asked = mixed_requests(84, 0, 16)
    greedy = next(one for one in asked if one.mode == "greedy")
    right = {0: Choice([300, 301], "ab", "stop")}

    def judged(choice: Choice) -> list[bool]:
        got = Delivery(greedy, "id", [Attempt(0.0, 0.1, "answered", {0: choice})])
        found = explain_differences("zoo:nowhere", [(got, "differing")], {greedy.index: right})
        return [one["proven"] for one in found]

    assert judged(Choice([300, 301], "abc", "stop")) == [False]
    assert judged(Choice([300, 301], "ab", "length")) == [False]
    # No target is loaded for these.
    assert explain_differences("zoo:nowhere", [], {}) == []
