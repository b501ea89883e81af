"""A drafter of the demo family as the target of the smaller ones, for tests in which any models would do."""

from __future__ import annotations

from typing import Any

from deployments.demo import demo_config

TARGET = "drafter-general-2x192"


def small_family() -> dict[str, Any]:
    """The demo configuration with it: forwards take a fraction of the time."""
    raw = demo_config().model_dump()
    raw["target"] |= {"path": f"zoo:{TARGET}", "num_slots": 2048}
    raw["drafters"] = [drafter for drafter in raw["drafters"] if drafter.get("path") != raw["target"]["path"]]
    return raw
