"""Slot pool, prefix cache and slot tables against models that track plain Python values."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache import KVCache
from engine.prefix_cache import BLOCK_TOKENS, PrefixCache
from engine.slots import OutOfSlots, SlotPool
from tests.examples import examples

SLOTS = 96


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@given(
    st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 9)), max_size=60)
)
def test_slot_pool_counts_like_a_counter(operations: list[tuple[str, int]]) -> None:
    pool, holders, groups = SlotPool(16), Counter[int](), []
    for name, n in operations:
        if name == "allocate":
            free = 16 - len(+holders)
            if n > free:
                with pytest.raises(OutOfSlots):
                    pool.allocate(n)
            else:
                slots = pool.allocate(n)
                assert not set(slots.tolist()) & set(+holders)
                assert len(set(slots.tolist())) == n
                holders.update(slots.tolist())
                groups.append(slots)
        elif groups:
            group = groups[n % len(groups)]
            if name == "retain":
                pool.retain(group)
                holders.update(group.tolist())
                groups.append(group)
            else:
                groups.pop(n % len(groups))
                pool.release(group)
                holders.subtract(group.tolist())
        assert pool.free_count == 16 - len(+holders)
        assert pool.references.tolist() == [holders[slot] for slot in range(16)]
        pool.check_invariants()


def test_slot_pool_refuses_misuse() -> None:
    pool = SlotPool(4)
    slots = pool.allocate(2)
    assert slots.tolist() == [0, 1]
    with pytest.raises(ValueError, match="free"):
        pool.release(ints(1, 2))
    with pytest.raises(ValueError, match="free"):
        pool.retain(ints(3))
    assert pool.references.tolist() == [1, 1, 0, 0]
    pool.keep(slots)
    assert pool.release(slots) == 0
    assert pool.num_unused == 2
    for misuse, wrong in ((pool.keep, slots[:1]), (pool.release, slots[:1]), (pool.let_go, ints(3))):
        with pytest.raises(ValueError, match=r"twice|only an index holds|not kept"):
            misuse(wrong)
    assert pool.let_go(slots[:1]) == 1
    assert (pool.num_unused, pool.free_count) == (1, 3)
    pool.check_invariants()
    with pytest.raises(ValueError, match="at least one"):
        SlotPool(0)


def test_prefix_cache_evicts_old_leaves_first_and_spares_blocks_in_use() -> None:
    pool = SlotPool(8 * BLOCK_TOKENS)
    cache = PrefixCache(pool)

    def fill(*blocks: int) -> np.ndarray:
        tokens = np.repeat(ints(*blocks), BLOCK_TOKENS)
        slots = pool.allocate(len(tokens))
        kept = cache.insert(tokens, slots)
        pool.release(slots)
        return kept

    fill(1, 2, 3)
    used = fill(7)
    pool.retain(used)
    fill(4)
    assert cache.evict(1) == BLOCK_TOKENS
    cache.check_invariants()
    match = {
        block: len(cache.match(np.repeat(ints(*block), BLOCK_TOKENS))) for block in [(1, 2, 3), (4,), (7,)]
    }
    assert match == {(1, 2, 3): 2 * BLOCK_TOKENS, (4,): BLOCK_TOKENS, (7,): BLOCK_TOKENS}
    assert cache.evictable_slots == 3 * BLOCK_TOKENS
    assert cache.evict(1000) == 3 * BLOCK_TOKENS
    assert len(cache) == 1
    pool.release(used)
    assert cache.evict(1) == BLOCK_TOKENS
    assert pool.free_count == len(pool)


class Oracle:
    """What every slot should hold, its namespace and the tokens up to it, following the cache's calls."""

    def __init__(self) -> None:
        self.cache = KVCache(SLOTS)
        self.content: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.namespace: dict[str, bytes] = {}
        self.tokens: dict[str, list[int]] = {}
        self.reserved: dict[str, list[int]] = {}

    def check(self) -> None:
        self.cache.check_invariants()
        for name, tokens in self.tokens.items():
            past = self.cache.past(name).tolist()
            assert len(past) == len(set(past)) == self.cache.length(name) <= len(tokens)
            for position, slot in enumerate(past):
                assert self.content[slot] == (self.namespace[name], tuple(tokens[: position + 1]))
            assert not set(self.reserved[name]) & set(past)

    def open(self, name: str, tokens: list[int], namespace: bytes) -> None:
        shared = self.cache.open(name, tokens, namespace)
        self.namespace[name] = namespace
        assert 0 <= shared <= max(0, len(tokens) - 1)
        self.tokens[name], self.reserved[name] = tokens, []

    def reserve(self, name: str, n: int) -> list[int]:
        free = self.cache.free_slots
        if n > free:
            with pytest.raises(OutOfSlots):
                self.cache.reserve(name, n)
            assert self.cache.free_slots == free
            return []
        slots = self.cache.reserve(name, n).tolist()
        assert self.cache.free_slots == free - n
        self.reserved[name] += slots
        return slots

    def extend(self, name: str, n: int, wasted: int) -> None:
        """Prefill or accept `n` tokens out of `n + wasted` rows, then roll the rest back."""
        n = min(n, len(self.tokens[name]) - self.cache.length(name))
        slots = self.reserve(name, n + wasted)[::-1]
        if slots:
            start = self.cache.length(name)
            for offset, slot in enumerate(slots[:n]):
                self.content[slot] = (self.namespace[name], tuple(self.tokens[name][: start + offset + 1]))
            self.cache.commit(name, np.array(slots[:n], dtype=np.int32))
            self.reserved[name] = [slot for slot in self.reserved[name] if slot not in slots[:n]]

    def discard(self, name: str, kept: int = 0) -> None:
        """Discard all but the last `kept` reserved slots, handed over in two pieces."""
        keep = self.reserved[name][len(self.reserved[name]) - min(kept, len(self.reserved[name])) :]
        free = self.cache.free_slots
        self.cache.discard(name, [ints(*keep[:1]), ints(*keep[1:])] if keep else [])
        assert self.cache.free_slots == free + len(self.reserved[name]) - len(keep)
        self.reserved[name] = keep

    def release(self, name: str) -> None:
        self.cache.release(name)
        del self.tokens[name], self.reserved[name]


@examples(60)
@given(st.data())
def test_kv_cache_shares_rolls_back_and_never_leaks(data: st.DataObject) -> None:
    oracle = Oracle()
    prefixes = [[1] * 16 + [2] * 16, [1] * 16 + [3] * 20, [4] * 33]
    for step in range(data.draw(st.integers(1, 25))):
        choices = ["open"] + (
            ["extend", "discard", "truncate", "publish", "release"] if oracle.tokens else []
        )
        operation = data.draw(st.sampled_from(choices))
        if operation == "open":
            tail = data.draw(st.lists(st.integers(5, 6), max_size=4))
            # One that looks like the beginning of tokens is no other's.
            namespace = data.draw(st.sampled_from([b"", b"", b"\x01\0\0\0", b"one"]))
            oracle.open(f"r{step}", [*data.draw(st.sampled_from(prefixes)), *tail], namespace)
        else:
            name = data.draw(st.sampled_from(sorted(oracle.tokens)))
            if operation == "extend":
                oracle.extend(name, data.draw(st.integers(0, 40)), data.draw(st.integers(0, 5)))
            elif operation == "truncate":
                length = data.draw(st.integers(0, oracle.cache.length(name)))
                oracle.cache.truncate(name, length)
                if data.draw(st.booleans()):  # and it goes on with others
                    tokens = oracle.tokens[name]
                    oracle.tokens[name] = [*tokens[:length], *[step % 3 + 7] * (len(tokens) - length)]
            elif operation == "discard":
                oracle.discard(name, data.draw(st.integers(0, 3)))
            elif operation == "publish":
                oracle.cache.publish(name, oracle.tokens[name])
            else:
                getattr(oracle, operation)(name)
        oracle.check()
    for name in list(oracle.tokens):
        oracle.release(name)
    oracle.check()
    assert oracle.cache.free_slots == SLOTS


@examples(60)
@given(
    steps=st.lists(
        st.lists(st.tuples(st.integers(0, 6), st.sets(st.integers(0, 5))), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    ),
    is_shared=st.booleans(),
)
def test_several_requests_at_once_are_one_after_the_other(
    steps: list[list[tuple[int, set[int]]]], is_shared: bool
) -> None:
    """With one that holds the rest of the pool as a shared prefix, which is evicted on the way."""
    together, singly = KVCache(SLOTS), KVCache(SLOTS)
    for cache in (together, singly):
        for name in "abcd":
            cache.open(name, [1])
        if is_shared:
            cache.open("other", [1])
            cache.commit("other", cache.reserve("other", 80))
            cache.publish("other", range(80))
            cache.release("other")
    for step in steps:
        wanted = [(name, n) for name, (n, _) in zip("abcd", step, strict=False)]
        reserved = together.reserve_all(wanted)
        alone = [singly.reserve(name, n) for name, n in wanted]
        assert [len(part) for part in reserved] == [n for _, n in wanted]
        together.check_invariants()
        kept = [sorted(index for index in chosen if index < n) for n, chosen in step]
        together.settle_all(
            [(name, part, some) for (name, _), part, some in zip(wanted, reserved, kept, strict=True)]
        )
        for (name, _), part, some in zip(wanted, alone, kept, strict=True):
            singly.commit(name, part[some])
            singly.discard(name)
        together.check_invariants()
        for (name, _), part, some in zip(wanted, reserved, kept, strict=True):
            assert together.past(name)[together.length(name) - len(some) :].tolist() == part[some].tolist()
            assert together.length(name) == singly.length(name)
        assert together.free_slots == singly.free_slots


def test_several_requests_at_once_are_refused_together() -> None:
    cache = KVCache(8)
    for name in "ab":
        cache.open(name, [1])
    with pytest.raises(OutOfSlots, match="9 KV slots wanted, 8 available"):
        cache.reserve_all([("a", 4), ("b", 5)])
    assert cache.free_slots == 8
    first, second = cache.reserve_all([("a", 3), ("b", 2)])
    for wrong in (
        [("a", first, [0, 0])],
        [("a", first, [3])],
        [("a", first, [-1])],
        [("a", first.copy(), [0])],
        [("a", first, [0]), ("b", first, [0])],
    ):
        with pytest.raises(ValueError, match=r"twice|no such slots|not what is reserved"):
            cache.settle_all(wrong)
    assert cache.free_slots == 3
    cache.settle_all([("a", first, [0, 2]), ("b", second, [])])
    cache.settle_all([])
    assert cache.past("a").tolist() == first[[0, 2]].tolist()
    assert cache.free_slots == 6
    cache.check_invariants()


def test_open_reports_a_published_prefix_but_leaves_a_token_to_run() -> None:
    cache = KVCache(64)
    tokens = list(range(32))
    assert cache.open("a", tokens) == 0
    cache.commit("a", cache.reserve("a", 32))
    cache.publish("a", tokens)
    assert cache.open("b", tokens) == 31
    assert cache.past("b").tolist() == cache.past("a")[:31].tolist()
    assert cache.open("c", [*range(16), 99]) == 16
    assert cache.open("d", [99, *range(16)]) == 0
    assert cache.free_slots == 32
    cache.release("a")
    assert cache.free_slots == 33  # token 31, which nobody but the index holds any more
    assert "a" not in cache
    assert "b" in cache


def test_prefixes_are_shared_within_a_namespace() -> None:
    cache = KVCache(256)
    tokens = list(range(32))
    for name, namespace in (("a", b""), ("b", b"one"), ("c", b"other")):
        assert cache.open(name, tokens, namespace) == 0
        cache.commit(name, cache.reserve(name, 32))
        cache.publish(name, tokens)
        cache.check_invariants()
    for name, namespace, first in (("d", b"", "a"), ("e", b"one", "b"), ("f", b"other", "c")):
        assert cache.would_share([*tokens, *range(40)], [*tokens, *range(40)], namespace)
        assert cache.open(name, tokens, namespace) == 31
        assert cache.past(name).tolist() == cache.past(first)[:31].tolist()
    assert cache.open("g", tokens, b"none of these") == 0


def test_what_was_cut_back_into_a_published_block_and_went_on_is_not_published() -> None:
    """Slots of its beginning are in the other block; it raised, and the request was never released."""
    cache = KVCache(100)
    cache.open("a", [1] * 40)
    cache.commit("a", cache.reserve("a", 32))
    cache.publish("a", [1] * 32)
    cache.truncate("a", 20)
    other = [*[1] * 20, *[2] * 12]
    cache.commit("a", cache.reserve("a", 12))
    cache.publish("a", other)
    cache.check_invariants()
    cache.release("a")
    assert cache.open("b", [1] * 40) == 32
    assert cache.open("c", [*other, 3]) == 16
    cache.check_invariants()


def test_publishing_what_another_request_published_frees_the_duplicate() -> None:
    cache = KVCache(64)
    for name in "ab":
        cache.open(name, range(20))
        cache.commit(name, cache.reserve(name, 20))
    assert cache.free_slots == 24
    for name in "ab":
        cache.publish(name, range(20))
    assert cache.past("a")[:16].tolist() == cache.past("b")[:16].tolist()
    assert cache.free_slots == 40
    cache.check_invariants()


def test_kv_cache_refuses_misuse() -> None:
    cache = KVCache(8, prefix_sharing=False)
    cache.open("a", [1])
    cache.open("b", [1])
    slots = cache.reserve("a", 4)
    for owner, wrong in (("b", slots[:1]), ("a", slots[[0, 0]]), ("a", ints(7))):
        with pytest.raises(ValueError, match="not reserved"):
            cache.commit(owner, wrong)
    cache.commit("a", slots[:1])
    with pytest.raises(ValueError, match="not reserved"):
        cache.commit("a", slots[:1])
    with pytest.raises(ValueError, match="already open"):
        cache.open("a", [1])
    with pytest.raises(ValueError, match="truncate"):
        cache.truncate("a", 2)
    with pytest.raises(ValueError, match="keep are not reserved"):
        cache.discard("b", [slots[1:2]])
    with pytest.raises(OutOfSlots, match="5 KV slots wanted, 4 available"):
        cache.reserve("b", 5)
    with pytest.raises(KeyError):
        cache.length("c")
    cache.check_invariants()
