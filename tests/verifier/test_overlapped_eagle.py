"""Calls that are begun early beside EAGLE's layer: what it reads of them, it reads as if they were not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.sampling_params import SamplingParams
from tests.eagle_reference import EagleReference
from tests.examples import examples
from tests.verifier.ahead import Scheduler, simple
from tests.verifier.target import VOCAB, Client, Target, spec_of
from tests.verifier.test_eagle_drafts import DEPTH, GREEDY, WIDTH, Checker, prefill_item, verifier
from tests.verifier.test_overlapped import plain, serve, tokens_of
from verifier.messages import PrefillItem, Verdict, VerifyCall, VerifyItem
from verifier.overlapped import OverlappedCalls

TARGET = Target()
PROMPTS = {"a": [5, 9, 33, 21], "b": [17, 2, 60, 21, 33, 9], "c": [40, 41, 7]}


class Checked(Client):
    """A client that compares what is proposed to it."""

    check: Checker

    def take(self, verdict: Verdict) -> None:
        super().take(verdict)
        if verdict.proposals is not None:
            self.check(verdict, self.spec, self.output)


# Without stop tokens, which end paths of a beam: what stands there then is nobody's choice.
sampled = simple.map(lambda params: replace(params, stop_token_ids=(), min_tokens=0))


@examples(25, suppress_health_check=list(HealthCheck))
@given(
    asked=st.lists(sampled, min_size=1, max_size=4),
    kind=st.sampled_from(["lean", "captured", "hf"]),
    leaving=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**32),
)
def test_proposals_are_those_of_the_reference_in_any_schedule(
    tmp_path_factory: pytest.TempPathFactory,
    asked: list[SamplingParams],
    kind: str,
    leaving: float,
    seed: int,
) -> None:
    reference, rng = EagleReference(TARGET.plain), random.Random(seed)
    serving = verifier(reference, tmp_path_factory.mktemp("eagle"), kind=kind, num_slots=400, overlaps=True)
    clients = []
    for i, sampling in enumerate(asked):
        # No two begin alike: what a shared slot's key says of the token after depends on who came first.
        prompt = [i, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 20)))]
        spec = spec_of(f"r{i}", prompt, sampling)
        expected, gaps = TARGET.decode(spec)
        assume(min(gaps) > 1e-4)
        client = Checked(spec, expected)
        client.check = Checker(reference)
        clients.append(client)
    calls = OverlappedCalls(serving)
    serve(calls, Scheduler(clients, random.Random(seed), leaving, (WIDTH, DEPTH)))
    assert [client.output for client in clients] == [client.expected for client in clients]
    calls.forget_all(with_prefixes=True)
    assert serving.free_slots == 400
    serving._table._cache.check_invariants()


def test_plain_steps_are_begun_early_and_read_when_somebody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verifier.eagle_reading.MOST_UNREAD", 5)
    reference = EagleReference(TARGET.plain)
    serving, check = verifier(reference, tmp_path, overlaps=True), Checker(reference)
    specs = {name: spec_of(name, prompt, GREEDY) for name, prompt in PROMPTS.items()}
    expected = {name: TARGET.decode(spec)[0] for name, spec in specs.items()}
    opening = [PrefillItem(request_id=name, num_tokens=9, spec=specs[name]) for name in ("a", "b")]
    newcomer = PrefillItem(request_id="c", num_tokens=9, spec=specs["c"])
    asking = [VerifyItem(request_id=name, num_candidates=WIDTH, num_heads=DEPTH) for name in PROMPTS]
    steps = [
        VerifyCall(call_id=0, prefill=opening),
        *(plain(i, "a", "b") for i in range(1, 4)),
        VerifyCall(call_id=4, verify=[VerifyItem(request_id="a")], prefill=[newcomer]),
        plain(5, "a", "c"),
        VerifyCall(call_id=6, verify=asking),
    ]
    calls, begun = OverlappedCalls(serving), []
    outputs: dict[str, list[int]] = {name: [] for name in PROMPTS}
    for number, step in enumerate(steps):
        following = steps[number + 1] if number + 1 < len(steps) else None
        result = calls.answer(step, lambda following=following: following)
        begun.append(calls.has_begun)
        for progress in result.prefills:
            assert progress.verdict is not None
            outputs[progress.request_id] += progress.verdict.tokens
        for name, tokens in tokens_of(result).items():
            outputs[name] += tokens
    # Of the last the proposals of those who go on would be lost.
    assert begun == [True] * 5 + [False] * 2
    assert outputs == {name: tokens[: len(outputs[name])] for name, tokens in expected.items()}
    for verdict in result.verdicts:
        check(verdict, specs[verdict.request_id], outputs[verdict.request_id])
    assert check.num_clear > 1


def test_who_asks_is_answered_before_another_call_is_begun(tmp_path: Path) -> None:
    serving = verifier(EagleReference(TARGET.plain), tmp_path, overlaps=True)
    spec, other = spec_of("a", PROMPTS["a"], GREEDY), spec_of("b", PROMPTS["b"], GREEDY)
    begun = serving.begin(VerifyCall(call_id=1, prefill=[prefill_item(spec)]))
    following = VerifyCall(call_id=2, prefill=[PrefillItem(request_id="b", num_tokens=3, spec=other)])
    assert serving.begin_following(following, begun) is None
    assert serving.finish(begun).prefills[0].verdict is not None


def test_where_features_find_no_room_requests_are_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = verifier(EagleReference(TARGET.plain), tmp_path, overlaps=True)
    spec = spec_of("a", PROMPTS["a"], GREEDY)
    opening = PrefillItem(request_id="a", num_tokens=9, spec=spec)
    serving.step(VerifyCall(call_id=0, prefill=[opening]))

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    assert serving._reader is not None
    with monkeypatch.context() as patch:
        patch.setattr(serving._reader, "hold", fail)
        with pytest.raises(RuntimeError):
            serving.begin(plain(1, "a"))
    serving._table._cache.check_invariants()
    assert tokens_of(serving.step(plain(1, "a"))) == {"a": TARGET.decode(spec)[0][1:2]}
