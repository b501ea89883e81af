"""Limits of a key that are changed while its requests are under way."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import yaml

from cluster.security_config import SecurityConfig
from deployments.api_keys import hash_key, new_key
from deployments.authentication import Authenticator, Grant
from deployments.errors import ApiError


class Server:
    """One key, in a file whose limits the test writes."""

    def __init__(self, path: Path, **limits: int) -> None:
        self.now = 0.0
        self.path, self.key = path, new_key()
        self.hash = hash_key(self.key)
        self.write(**limits)
        self.authenticator = Authenticator(
            SecurityConfig(keys_file=path), environment={}, clock=lambda: self.now
        )

    def write(self, **limits: int) -> None:
        self.path.write_text(yaml.safe_dump({"keys": [{"name": "a", "hash": self.hash, "limits": limits}]}))

    def change(self, **limits: int) -> None:
        self.write(**limits)
        self.now += 2.0

    def open(self) -> AbstractContextManager[Grant]:
        return self.authenticator.admitted(f"Bearer {self.key}", "api", limited=True)


def test_a_request_from_before_does_not_fill_the_bucket_again(tmp_path: Path) -> None:
    server = Server(tmp_path / "keys.yaml", requests_per_minute=5)
    with server.open() as early:
        server.change(requests_per_minute=3)
        for _ in range(2):
            with server.open():
                pass
        assert early.headers()["x-ratelimit-limit-requests"] == "3"
        # One in five had been used before.
        with pytest.raises(ApiError, match="3 requests per minute"), server.open():
            pass


def test_requests_that_are_open_count_towards_the_new_limit(tmp_path: Path) -> None:
    server = Server(tmp_path / "keys.yaml", max_concurrent=2)
    with server.open(), server.open():
        server.change(max_concurrent=1)
        with pytest.raises(ApiError, match="1 requests at once"), server.open():
            pass
    with server.open():
        pass
    server.change()
    with server.open() as unlimited:
        assert unlimited.headers() == {}
    server.change(requests_per_minute=1)
    with server.open(), pytest.raises(ApiError, match="1 requests per minute"), server.open():
        pass


def test_the_message_names_the_time_of_the_header(tmp_path: Path) -> None:
    server = Server(tmp_path / "keys.yaml", requests_per_minute=1)
    with server.open():
        server.now = 31.6  # there is one again in 28.4 s
        with pytest.raises(ApiError, match="try again in 29 s") as refused, server.open():
            pass
    assert refused.value.response().headers["retry-after"] == "29"
