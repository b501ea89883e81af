"""Of many keys one that was presented before is found without a search, and as a search finds it."""

from __future__ import annotations

import hmac
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.security_config import KeyConfig
from deployments import presented_keys
from deployments.api_keys import find_key, hash_key, new_key
from deployments.presented_keys import PresentedKeys
from tests.cluster.counted_calls import counting


def kept(*keys: str) -> list[KeyConfig]:
    return [KeyConfig(name=f"k{number}", hash=hash_key(key)) for number, key in enumerate(keys)]


SECRETS = [new_key() for _ in range(4)]
RINGS = [kept(*SECRETS[:2]), kept(*SECRETS[1:3]), kept()]


@given(st.lists(st.tuples(st.sampled_from([*SECRETS, SECRETS[0] + "x", ""]), st.integers(0, 2)), max_size=30))
def test_what_is_found_is_what_a_search_finds(asked: list[tuple[str, int]]) -> None:
    """Also where keys were withdrawn since, or came."""
    presented = PresentedKeys()
    for key, ring in asked:
        assert presented.find(key, RINGS[ring]) is find_key(key, RINGS[ring])


def test_a_key_is_searched_for_once_and_a_wrong_one_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request of a server with a thousand keys cost its front end 2.4 ms."""
    keys, presented, calls = (
        kept(*(new_key() for _ in range(20)), SECRETS[0]),
        PresentedKeys(),
        Counter[str](),
    )
    monkeypatch.setattr(hmac, "digest", counting(hmac.digest, calls))
    for _ in range(5):
        assert presented.find(SECRETS[0], keys) is keys[-1]
    assert calls.total() == len(keys) + 5
    for number in range(1, 4):
        assert presented.find(SECRETS[1], keys) is None
        assert calls.total() == len(keys) + 5 + number * (len(keys) + 1)


def test_a_key_that_was_withdrawn_is_found_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    presented, before = PresentedKeys(), kept(*SECRETS[:2])
    assert presented.find(SECRETS[0], before) is before[0]
    after = before[1:]
    assert presented.find(SECRETS[0], after) is None
    assert presented.find(SECRETS[1], after) is before[1]


def test_few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presented_keys, "MOST_KEPT", 2)
    presented, keys = PresentedKeys(), kept(*SECRETS)
    for key in [*SECRETS, *SECRETS[::-1]]:
        assert presented.find(key, keys) is find_key(key, keys)
        assert len(presented._found) <= 2
