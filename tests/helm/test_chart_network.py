"""A network policy that would cut off what the values ask for is refused, by a message that names both."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.rendered_chart import files, refusal

ZEROES = "0" * 40

CLOSED = {"enabled": True, "egress": {"enabled": True}}
DOWNLOAD = {
    "source": "download",
    "download": [{"repository": "a/b", "directory": "a", "revision": ZEROES}],
}
#: By name: values, and what the message must say.
CUT_OFF: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "an autoscaler that does not reach the API server": (
        {"networkPolicy": CLOSED},
        ("networkPolicy.egress.rules", "autoscaler.enabled", "API server"),
    ),
    "a head that does not reach Redis": (
        {
            "networkPolicy": CLOSED,
            "autoscaler": {"enabled": False},
            "gcsFaultTolerance": {"enabled": True, "redisAddress": "redis:6379"},
        },
        ("networkPolicy.egress.rules", "gcsFaultTolerance", "Redis"),
    ),
    "a download that does not reach the Hub": (
        {"networkPolicy": CLOSED, "autoscaler": {"enabled": False}, "models": DOWNLOAD},
        ("networkPolicy.egress.rules", "models.source", "Hub"),
    ),
    "a Prometheus that does not reach the pods": (
        {"networkPolicy": {"enabled": True}, "monitoring": {"podMonitor": {"enabled": True}}},
        ("networkPolicy.monitoring", "monitoring.podMonitor.enabled", "Prometheus"),
    ),
    "traces that do not reach their collector": (
        {
            "networkPolicy": CLOSED,
            "autoscaler": {"enabled": False},
            "config": {"telemetry": {"otlp_endpoint": "http://collector:4318"}},
        },
        ("networkPolicy.egress.rules", "config.telemetry.otlp_endpoint", "collector"),
    ),
}


@pytest.mark.parametrize("name", CUT_OFF)
def test_it_is_refused_by_name(name: str) -> None:
    values, named = CUT_OFF[name]
    message = refusal(values)
    for part in named:
        assert part in message


def test_what_is_open_is_taken() -> None:
    open_to = {"enabled": True, "egress": {"enabled": True, "rules": [{"to": []}]}}
    assert files(
        {"networkPolicy": open_to, "config": {"telemetry": {"otlp_endpoint": "http://collector:4318"}}}
    )
    assert files({"networkPolicy": CLOSED, "autoscaler": {"enabled": False}})
    scraped = {"enabled": True, "monitoring": [{"namespaceSelector": {}}]}
    assert files({"networkPolicy": scraped, "monitoring": {"podMonitor": {"enabled": True}}})
