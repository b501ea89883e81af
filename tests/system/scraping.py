"""What a served system exposes to Prometheus."""

from __future__ import annotations

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.system.conftest import Server


def scrape(server: Server) -> tuple[str, dict[str, Metric]]:
    """The exposition and its metrics by name in the catalog."""
    text = httpx.get(f"{server.url}/metrics", headers=server.headers, timeout=30).text
    families = {}
    for family in text_string_to_metric_families(text):
        families[family.name + "_total" * (family.type == "counter")] = family
    return text, families


def value(server: Server, name: str, **labels: str) -> float:
    """Sum of the samples of this name with these labels; 0 without any."""
    _, families = scrape(server)
    return sum(
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
