"""Where clients reach a system whose front ends Ray may start on any machine."""

from __future__ import annotations

import re

import pytest

from deployments.preflight import StartError
from deployments.reached import Places

HERE, ELSEWHERE = "10.0.0.1", "10.0.0.2"


@pytest.mark.parametrize(
    ("host", "front_ends", "shown"),
    [
        ("127.0.0.1", (HERE,), "127.0.0.1"),
        ("127.0.0.1", (ELSEWHERE, HERE), "127.0.0.1"),
        ("0.0.0.0", (HERE, ELSEWHERE), "127.0.0.1"),
        ("0.0.0.0", (ELSEWHERE,), ELSEWHERE),
        ("::", (ELSEWHERE,), ELSEWHERE),
        (ELSEWHERE, (ELSEWHERE,), ELSEWHERE),
        ("127.0.0.1", (), "127.0.0.1"),  # nobody knows: it is asked there
    ],
)
def test_a_front_end_on_this_machine_is_reached_by_its_own_address(
    host: str, front_ends: tuple[str, ...], shown: str
) -> None:
    assert Places(HERE, front_ends, head=ELSEWHERE).reached_at("http", host, is_direct=True) == shown


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_front_ends_that_only_others_reach_are_told_with_where_they_are(host: str) -> None:
    """The server was asked in vain for a minute, and its end was "connection refused"."""
    with pytest.raises(StartError, match=rf"front ends are on {ELSEWHERE}, and grpc.host is {host}") as told:
        Places(HERE, (ELSEWHERE,), head=HERE).reached_at("grpc", host, is_direct=True)
    remedy = f'scaling: {{front_ends: {{placement: {{resources: {{"node:{HERE}": 0.001}}}}}}}}'
    assert remedy in str(told.value)


def test_a_proxy_is_on_the_head() -> None:
    places = Places(HERE, (HERE,), head=ELSEWHERE)
    assert places.reached_at("http", "0.0.0.0", is_direct=False) == ELSEWHERE
    with pytest.raises(StartError, match=re.escape(f"its proxy is on {ELSEWHERE}")):
        places.reached_at("http", "127.0.0.1", is_direct=False)
    assert Places(HERE, (), head=HERE).reached_at("http", "127.0.0.1", is_direct=False) == "127.0.0.1"
