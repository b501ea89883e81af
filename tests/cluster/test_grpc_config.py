"""The gRPC service listens where the configuration says, or refuses to start."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from cluster.grpc_config import GrpcConfig


def test_the_proxy_which_listens_everywhere_is_not_taken_for_loopback() -> None:
    with pytest.raises(ValidationError, match="listens on every address"):
        GrpcConfig(enabled=True, direct=False)
    assert GrpcConfig(enabled=True, direct=False, host="::").port == 9000
    assert not GrpcConfig(direct=False).enabled


def test_it_is_off_and_on_loopback_unless_told_otherwise() -> None:
    config = GrpcConfig()
    assert (config.enabled, config.host, config.direct) == (False, "127.0.0.1", True)
