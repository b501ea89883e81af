"""The verify call's contract, case by case."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.runner import Segment
from engine.sampling_params import RequestSpec, SamplingParams
from engine.tree import TokenTree
from engine.wire import Decoder, encode
from tests.verifier.target import VOCAB, Target, random_tree, spec_of
from verifier.messages import PrefillItem, Verdict, VerifyCall, VerifyItem, VerifyResult
from verifier.profile import measure_step_costs
from verifier.verifier import Verifier

TARGET = Target()
PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def prefill(
    verifier: Verifier, spec: RequestSpec, num_tokens: int = 100, release: Sequence[str] = ()
) -> VerifyResult:
    item = PrefillItem(request_id=spec.request_id, num_tokens=num_tokens, spec=spec)
    return verifier.step(VerifyCall(call_id=1, prefill=[item], release=list(release)))


def verify(verifier: Verifier, **trees: TokenTree) -> VerifyResult:
    items = [VerifyItem(request_id=name, tree=tree) for name, tree in trees.items()]
    return verifier.step(VerifyCall(call_id=2, verify=items))


def started(spec: RequestSpec, num_slots: int = 400) -> tuple[Verifier, list[int]]:
    """A verifier holding `spec` ready for trees, and the tokens decided so far."""
    verifier = Verifier(TARGET.runner(num_slots))
    verdict = prefill(verifier, spec).prefills[0].verdict
    assert verdict is not None
    return verifier, verdict.tokens


def chain(tokens: Sequence[int]) -> TokenTree:
    """The first token is the root."""
    return TokenTree.chain(tokens[0], tokens[1:], [-0.1] * (len(tokens) - 1))


def test_chunked_prefill_reports_progress() -> None:
    spec = spec_of("a", PROMPT)
    verifier = Verifier(TARGET.runner())
    results = [prefill(verifier, spec, 5)]
    results += [
        verifier.step(VerifyCall(call_id=i, prefill=[PrefillItem(request_id="a", num_tokens=5)]))
        for i in range(2)
    ]
    assert [r.prefills[0].num_computed for r in results] == [5, 10, 12]
    assert [r.num_tokens for r in results] == [5, 5, 2]
    assert [r.prefills[0].verdict is None for r in results] == [True, True, False]
    verdict = results[2].prefills[0].verdict
    assert verdict is not None
    assert verdict.tokens == TARGET.decode(spec)[0][:1]
    assert results[2].digest == zlib.crc32(np.array(verdict.tokens, np.int32).tobytes())
    assert 0 < results[2].forward_seconds <= results[2].seconds


def test_accepted_nodes_and_bonus() -> None:
    spec = spec_of("a", PROMPT)
    expected, _ = TARGET.decode(spec)
    verifier, output = started(spec)
    other = (expected[1] + 1) % VOCAB
    tree = TokenTree(
        token=np.array([expected[0], other, expected[1], expected[2], other], np.int32),
        parent=np.array([-1, 0, 0, 2, 3], np.int32),
        logp=np.zeros(5, np.float32),
        depth=np.array([0, 1, 1, 2, 3], np.int32),
    )
    verdict = verify(verifier, a=tree).verdicts[0]
    right = other == expected[3]
    assert verdict.nodes == [2, 3] + [4] * right
    assert verdict.num_accepted == 2 + right
    assert output + verdict.tokens == expected[: 4 + right]
    assert 0 < verdict.min_gap < float("inf")


def test_stops_at_a_stop_token_inside_the_accepted_path() -> None:
    expected, _ = TARGET.decode(spec_of("a", PROMPT))
    stop = next(t for t in expected[2:] if t not in expected[:2])
    end = expected.index(stop) + 1
    sampling = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stop,))
    verifier, output = started(spec_of("a", PROMPT, sampling))
    verdict = verify(verifier, a=chain(expected)).verdicts[0]
    assert output + verdict.tokens == expected[:end]
    assert verdict.num_accepted == 10  # counted before the cut; deeper nodes are beyond max_tokens


def test_min_tokens_hold_stop_tokens_back() -> None:
    expected, _ = TARGET.decode(spec_of("a", PROMPT))
    sampling = SamplingParams(
        temperature=0.0, max_tokens=12, min_tokens=4, stop_token_ids=tuple(dict.fromkeys(expected[:6]))
    )
    spec = spec_of("a", PROMPT, sampling)
    delayed, _ = TARGET.decode(spec)
    verifier, output = started(spec)
    while len(output) < len(delayed):
        output += verify(verifier, a=chain([output[-1], *delayed[len(output) :]])).verdicts[0].tokens
    assert output == delayed
    assert not set(output[:4]) & set(sampling.stop_token_ids)


def test_max_tokens_cut_and_afterwards_nothing() -> None:
    long, _ = TARGET.decode(spec_of("a", PROMPT))
    spec = spec_of("a", PROMPT, SamplingParams(temperature=0.0, max_tokens=3))
    verifier, output = started(spec)
    result = verify(verifier, a=chain(long))
    assert output + result.verdicts[0].tokens == long[:3]
    assert result.num_tokens == 2  # deeper nodes could not be committed, so they were not computed
    again = verify(verifier, a=chain(long[2:3]))
    assert again.verdicts[0].tokens == []
    assert again.num_tokens == 0


@pytest.mark.parametrize("runner", ["lean", "hf", "captured"])
def test_going_on_from_the_last_known_token_is_what_its_root_alone_is(runner: str) -> None:
    """Also where others have trees, and a request is not known, not prefilled, or has all its tokens."""
    sampled = SamplingParams(temperature=0.9, seed=5, repetition_penalty=1.2, logprobs=2, max_tokens=9)
    specs = [spec_of("a", PROMPT, GREEDY), spec_of("b", PROMPT[:5], sampled), spec_of("c", PROMPT[3:])]
    told: list[list[bytes]] = []
    for is_named in (True, False):
        made = TARGET.runner(400, lean=runner == "lean", captured=runner == "captured")
        verifier, results = Verifier(made), []
        last = {}
        for spec in specs:
            verdict = prefill(verifier, spec).prefills[0].verdict
            assert verdict is not None
            last[spec.request_id] = verdict.tokens[-1]
        unread = PrefillItem(request_id="d", num_tokens=2, spec=spec_of("d", PROMPT))
        verifier.step(VerifyCall(call_id=1, prefill=[unread]))
        for step in range(14):
            items = [
                VerifyItem(request_id=name, tree=TokenTree.root_only(last[name]) if is_named else None)
                for name in ("a", "b")
            ]
            items.append(VerifyItem(request_id="c", tree=TokenTree.chain(last["c"], [1, 2], [-1.0, -1.0])))
            if step == 3:
                items += [VerifyItem(request_id="nobody"), VerifyItem(request_id="d")]
            result = verifier.step(VerifyCall(call_id=2 + step, verify=items))
            assert result.unknown == (["nobody"] if step == 3 else [])
            assert result.deferred == (["d"] if step == 3 else [])
            assert "d" in verifier
            results.append(encode([result.verdicts, result.free_slots, result.num_tokens]))
            for verdict in result.verdicts:
                last[verdict.request_id] = [last[verdict.request_id], *verdict.tokens][-1]
        told.append(results)
    assert told[0] == told[1]


def test_prefix_sharing_between_requests() -> None:
    prompt = [*range(1, 41)]
    verifier = Verifier(TARGET.runner())
    assert prefill(verifier, spec_of("a", prompt)).prefills[0].num_cached == 0
    second = prefill(verifier, spec_of("b", [*prompt, 50, 51])).prefills[0]
    assert second.num_cached >= 32
    assert second.verdict is not None
    assert second.verdict.tokens == TARGET.decode(spec_of("b", [*prompt, 50, 51]))[0][:1]
    third = prefill(verifier, spec_of("a", prompt, output=second.verdict.tokens), release=["a"]).prefills[0]
    assert third.num_cached >= 32


@pytest.mark.parametrize("with_prefixes", [False, True])
def test_all_requests_of_a_scheduler_that_is_gone_are_forgotten(with_prefixes: bool) -> None:
    prompt = [*range(1, 41)]
    spec = spec_of("a", prompt)
    verifier = Verifier(TARGET.runner())
    free = verifier.free_slots
    first = prefill(verifier, spec).prefills[0].verdict
    assert first is not None
    output = [*first.tokens]
    verifier.forget_all(with_prefixes=with_prefixes)
    assert "a" not in verifier
    assert verifier.free_slots == free
    assert verify(verifier, a=chain(output)).unknown == ["a"]
    # The next scheduler begins with what the other had, and gets what the target alone would have said.
    again = prefill(verifier, spec_of("a~2", prompt, output=output)).prefills[0]
    assert again.num_cached == 0 if with_prefixes else again.num_cached >= 32
    assert again.verdict is not None
    assert output + again.verdict.tokens == TARGET.decode(spec)[0][:2]


def test_deferral_changes_nothing() -> None:
    spec = spec_of("a", PROMPT)
    expected, _ = TARGET.decode(spec)
    verifier, output = started(spec, num_slots=20)
    free = verifier.free_slots
    assert free == 20 - 12
    refused = verify(verifier, a=chain([*expected[:1], *range(9)]))
    assert refused.deferred == ["a"]
    assert (refused.verdicts, refused.num_tokens, verifier.free_slots) == ([], 0, free)
    refused = prefill(verifier, spec_of("b", list(range(1, 12))))
    assert refused.deferred == ["b"]
    assert "b" not in verifier
    assert verifier.free_slots == free
    output += verify(verifier, a=chain(expected[:5])).verdicts[0].tokens
    assert output == expected[: len(output)]


def test_first_come_first_served_when_slots_run_out() -> None:
    expected, _ = TARGET.decode(spec_of("a", PROMPT))
    verifier, _ = started(spec_of("a", PROMPT), num_slots=34)
    prefill(verifier, spec_of("b", PROMPT))
    result = verify(verifier, a=chain(expected[:7]), b=chain(expected[:7]))
    assert [v.request_id for v in result.verdicts] == ["a"]
    assert result.deferred == ["b"]


def test_prefill_takes_a_smaller_chunk_when_slots_are_short() -> None:
    verifier, _ = started(spec_of("a", PROMPT), num_slots=30)
    progress = prefill(verifier, spec_of("b", list(range(1, 41)))).prefills[0]
    assert progress.num_computed == 18
    assert progress.verdict is None


def test_a_prompt_that_lacks_its_last_token_decides_nothing() -> None:
    """Its chunk had one slot too few, and its decoding was sent before that was known."""
    spec = spec_of("a", PROMPT * 3, GREEDY)
    verifier = Verifier(TARGET.runner(len(spec.tokens) + 20))
    prefill(verifier, spec_of("b", [5] * 21))
    assert prefill(verifier, spec).prefills[0].num_computed == len(spec.tokens) - 1
    result = verifier.step(VerifyCall(call_id=2, verify=[VerifyItem(request_id="a")], release=["b"]))
    assert (result.verdicts, result.deferred) == ([], ["a"])
    rest = verifier.step(VerifyCall(call_id=3, prefill=[PrefillItem(request_id="a", num_tokens=1)]))
    assert rest.prefills[0].verdict is not None
    assert rest.prefills[0].verdict.tokens == TARGET.decode(spec)[0][:1]


def test_unknown_requests_and_out_of_step_trees_are_reported() -> None:
    verifier, output = started(spec_of("a", PROMPT))
    prefill(verifier, spec_of("c", PROMPT[::-1]), 3)
    call = VerifyCall(
        call_id=7,
        verify=[
            VerifyItem(request_id="nobody", tree=chain([1])),
            VerifyItem(request_id="a", tree=chain([(output[-1] + 1) % VOCAB])),
            VerifyItem(request_id="c", tree=chain([1])),
        ],
        prefill=[
            PrefillItem(request_id="nobody2", num_tokens=4),
            PrefillItem(request_id="bad", num_tokens=4, spec=spec_of("bad", [1, VOCAB])),
            PrefillItem(request_id="empty", num_tokens=4, spec=spec_of("empty", [])),
            PrefillItem(request_id="long", num_tokens=4, spec=spec_of("long", [1] * 97)),
            PrefillItem(request_id="good", num_tokens=99, spec=spec_of("good", PROMPT)),
        ],
        release=["never seen"],
    )
    result = verifier.step(call)
    assert result.call_id == 7
    assert result.unknown == ["nobody", "a", "c", "nobody2", "bad", "empty", "long"]
    assert all(name not in verifier for name in result.unknown)
    assert result.prefills[0].verdict is not None
    assert result.prefills[0].verdict.tokens == output
    # The scheduler reopens what it is told is unknown.
    assert prefill(verifier, spec_of("a", PROMPT, output=output)).prefills[0].verdict is not None


@pytest.mark.parametrize("fault", ["parent", "depth", "token", "length", "type"])
def test_a_malformed_tree_harms_nobody(fault: str) -> None:
    spec = spec_of("a", PROMPT)
    expected, _ = TARGET.decode(spec)
    verifier, _ = started(spec)
    prefill(verifier, spec_of("b", PROMPT))
    good = chain(expected[:5])
    fields = {"token": good.token, "parent": good.parent, "logp": good.logp, "depth": good.depth}
    bad = {
        "parent": {"parent": np.array([-1, 3, 1, 2, 3], np.int32)},
        "depth": {"depth": np.array([0, 1, 2, 9, 4], np.int32)},
        "token": {"token": np.array([*expected[:4], VOCAB], np.int32)},
        "length": {"logp": good.logp[:3]},
        "type": {"parent": good.parent.astype(np.float32)},
    }[fault]
    result = verify(verifier, a=TokenTree(**{**fields, **bad}), b=good)
    assert [v.tokens for v in result.verdicts] == [expected[1:2], expected[1:6]]


def test_one_item_per_request_and_empty_calls() -> None:
    verifier, output = started(spec_of("a", PROMPT))
    item = VerifyItem(request_id="a", tree=chain(output))
    result = verifier.step(VerifyCall(call_id=1, verify=[item, item]))
    assert len(result.verdicts) == 1
    result = verifier.step(VerifyCall(call_id=2))
    assert (result.num_tokens, result.digest, result.forward_seconds) == (0, 0, 0.0)


def test_a_repeated_opening_continues_and_another_one_replaces() -> None:
    spec = spec_of("a", PROMPT)
    verifier = Verifier(TARGET.runner(), prefix_sharing=False)
    assert prefill(verifier, spec, 5).prefills[0].num_computed == 5
    assert prefill(verifier, spec, 5).prefills[0].num_computed == 10
    assert prefill(verifier, spec_of("a", PROMPT[1:]), 5).prefills[0].num_computed == 5


def test_a_failing_forward_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("a", PROMPT)
    expected, _ = TARGET.decode(spec)
    verifier, _ = started(spec)
    free = verifier.free_slots

    def fail(segments: Sequence[Segment], keep: np.ndarray) -> torch.Tensor:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(verifier._runner, "forward", fail)
        call = VerifyCall(
            call_id=1,
            verify=[VerifyItem(request_id="a", tree=chain(expected[:4]))],
            prefill=[PrefillItem(request_id="b", num_tokens=50, spec=spec_of("b", PROMPT))],
        )
        with pytest.raises(RuntimeError, match="device lost"):
            verifier.step(call)
    assert "b" not in verifier
    assert verifier.free_slots == free
    assert verify(verifier, a=chain(expected[:4])).verdicts[0].tokens == expected[1:5]


def test_equal_calls_over_the_wire_give_equal_digests() -> None:
    """Tensor-parallel ranks each decode the same call; so does a message that crossed the wire."""

    rng = random.Random(5)
    over_wire: Decoder[VerifyCall] = Decoder(VerifyCall)
    sampling = SamplingParams(temperature=0.9, seed=11, repetition_penalty=1.1, max_tokens=12)
    spec = spec_of("a", PROMPT, sampling)
    expected, _ = TARGET.decode(spec)
    ranks = [started(spec)[0] for _ in range(2)]
    output = expected[:1]
    while len(output) < 12:
        tree = random_tree(rng, output[-1], expected[len(output) :], "adversarial")
        call = VerifyCall(call_id=1, verify=[VerifyItem(request_id="a", tree=tree)])
        results = [ranks[0].step(call), ranks[1].step(over_wire.decode(encode(call)))]
        assert results[0].digest == results[1].digest != 0
        verdict: Verdict = results[0].verdicts[0]
        output += verdict.tokens
    assert output == expected


def test_step_costs() -> None:
    runner = TARGET.runner(200)
    costs = measure_step_costs(
        runner, token_counts=[1, 8, 500], contexts=[0, 40], repeats=2, request_counts=[1, 4]
    )
    shapes = {(requests, tokens, context) for requests, tokens, context, _ in costs}
    # 500 tokens fit nowhere, and 4 requests have at least a token each.
    assert shapes == {(1, 1, 0), (1, 8, 0), (1, 1, 40), (1, 8, 40), (4, 8, 0), (4, 8, 40)}
    assert all(seconds > 0 for *_, seconds in costs)
