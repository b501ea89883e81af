"""Ranks of one target, each of which begins the next call early or not as it comes to it, hold the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, assume, event, given
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from engine.tree import TokenTree
from tests.examples import examples
from tests.verifier.ahead import Scheduler, simple
from tests.verifier.target import Client, spec_of
from tests.verifier.test_lossless import TARGET, params, prompts
from verifier.messages import PrefillItem, VerifyCall, VerifyItem, VerifyResult
from verifier.overlapped import OverlappedCalls
from verifier.verifier import Verifier


class Rank:
    """A verifier that a message may reach in time, or too late to be begun before the answer."""

    def __init__(self, num_slots: int, captured: bool, rng: random.Random, in_time: float) -> None:
        runner = TARGET.runner(num_slots, captured=captured)
        self.verifier = Verifier(runner, overlaps=True, num_ranks=2)
        self._calls = OverlappedCalls(self.verifier)
        self._rng, self._in_time = rng, in_time
        self.num_early = 0

    def answer(self, call: VerifyCall, following: VerifyCall | None) -> VerifyResult:
        result = self._calls.answer(call, self._arrival(following))
        self.num_early += self.has_begun
        return result

    @property
    def has_begun(self) -> bool:
        return self._calls.has_begun

    def _arrival(self, following: VerifyCall | None) -> Callable[[], VerifyCall | None]:
        arrives = self._rng.random() < self._in_time
        return lambda: following if arrives else None

    def state(self) -> dict[str, Any]:
        """All that what it does later depends on, but for the numbers of slots."""
        cache = self.verifier._table._cache
        assert cache._prefixes is not None
        blocks = sorted(cache._prefixes._blocks.values(), key=lambda block: block.last_used)
        return {
            "requests": {name: cache.length(name) for name in self.verifier._table._requests},
            "empty": cache.empty_slots,
            "blocks": [(block.key, block.number, block.children) for block in blocks],
        }


def said(result: VerifyResult) -> dict[str, Any]:
    """All of an answer but how long it took."""
    fields = msgspec.to_builtins(result)
    return {name: value for name, value in fields.items() if not name.endswith("seconds")}


def agree(one: Any, other: Any) -> bool:
    """Whether they are the same but for rounding, which other numbers of slots may bring on a CPU.

    Ranks of one model share their sums, and so the rounding, too; these are two models.
    """
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(agree(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(agree, one, other))
    return bool(one == other) or (isinstance(one, float) and abs(one - other) < 1e-4)


@examples(30, suppress_health_check=list(HealthCheck))
@given(
    requests=st.lists(st.tuples(prompts, simple | simple | params), min_size=1, max_size=7),
    num_slots=st.sampled_from([90, 150, 600]),
    captured=st.booleans(),
    leaving=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**32),
)
def test_whenever_calls_come_ranks_hold_the_same(
    requests: list[tuple[list[int], SamplingParams]],
    num_slots: int,
    captured: bool,
    leaving: float,
    seed: int,
) -> None:
    rng = random.Random(seed)
    in_time = rng.choice([(1.0, 0.0), (0.5, 0.5)])
    ranks = [Rank(num_slots, captured, rng, share) for share in in_time]
    specs = [spec_of(f"r{i}", prompt, sampling) for i, (prompt, sampling) in enumerate(requests)]
    clients = []
    for spec in specs:
        expected, gaps = TARGET.decode(spec)
        assume(min(gaps) > 1e-4)
        clients.append(Client(spec, expected))
    scheduler = Scheduler(clients, rng, leaving)
    for _ in range(2000):
        call = scheduler.next()
        if call is None:
            break
        following = scheduler.waiting()
        answers = [rank.answer(call, following) for rank in ranks]
        scheduler.take(answers[0])
        found = [said(answer) for answer in answers]
        if any(rank.has_begun for rank in ranks):
            # Who has begun the next call has released what that one releases.
            for one in found:
                del one["free_slots"]
        else:
            assert ranks[0].state() == ranks[1].state()
        assert agree(found[0], found[1]), found
    else:
        raise AssertionError("no end in sight")
    assert [client.output for client in clients] == [client.expected for client in clients]
    assert ranks[0].state() == ranks[1].state()
    event("begun early" if ranks[0].num_early else "never begun early")
    for rank in ranks:
        rank.verifier._table._cache.check_invariants()


@pytest.mark.parametrize("max_forced", [0, 2])
def test_room_for_forced_tokens_waits_for_what_is_rejected(max_forced: int) -> None:
    """How much of it there is depends on how many slots are free."""
    verifier = Verifier(TARGET.runner(), overlaps=True, num_ranks=2)
    specs = [spec_of(name, [7, 3 + i, 11]) for i, name in enumerate("ab")]
    prefill = [PrefillItem(request_id=spec.request_id, num_tokens=9, spec=spec) for spec in specs]
    opened = verifier.step(VerifyCall(call_id=0, prefill=prefill))
    verdict = opened.prefills[0].verdict
    assert verdict is not None
    tree = TokenTree.chain(verdict.tokens[0], [1], [-0.1])
    begun = verifier.begin(VerifyCall(call_id=1, verify=[VerifyItem(request_id="a", tree=tree)]))
    other = opened.prefills[1].verdict
    assert other is not None
    root = TokenTree.root_only(other.tokens[0])
    item = VerifyItem(request_id="b", tree=root, max_forced=max_forced)
    following = verifier.begin_following(VerifyCall(call_id=2, verify=[item]), begun)
    assert (following is None) == (max_forced > 0)


def test_ranks_compute_the_same_rows_for_one_whose_stop_token_only_some_know_of() -> None:
    """A rank that begins a plain step early does not know yet, and all must run the same forward."""
    plain, _ = TARGET.decode(spec_of("a", [7, 3, 11]))
    spec = spec_of(
        "a", [7, 3, 11], SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(plain[1],))
    )
    calls = [
        VerifyCall(call_id=0, prefill=[PrefillItem(request_id="a", num_tokens=9, spec=spec)]),
        *(VerifyCall(call_id=number, verify=[VerifyItem(request_id="a")]) for number in (1, 2)),
    ]
    rows = []
    for is_early in (False, True):
        verifier = Verifier(TARGET.runner(), overlaps=True, num_ranks=2)
        verifier.step(calls[0])
        begun = verifier.begin(calls[1])
        following = verifier.begin_following(calls[2], begun) if is_early else None
        assert (following is not None) == is_early
        assert verifier.finish(begun).verdicts[0].tokens == [plain[1]]
        rows.append(verifier.finish(following or verifier.begin(calls[2])).num_tokens)
    assert rows == [1, 1]
