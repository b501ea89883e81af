"""Which hardware leaves room for drafting ahead."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config import FlotillaConfig, SchedulerConfig, TargetConfig
from cluster.drafter_config import PromptLookupConfig
from cluster.free_cores import settle_draft_ahead


@pytest.mark.parametrize(
    ("target", "asked", "cores", "allowed"),
    [
        ({}, None, 2, 1),
        ({"tensor_parallel": 2}, None, 2, 0),
        ({"tensor_parallel": 4}, None, 2, 0),
        ({}, None, 16, 15),
        ({"placement": {"num_gpus": 1.0}}, None, 2, 1),
        ({}, 0, 16, 0),
        ({"tensor_parallel": 2}, 3, 2, 3),
    ],
)
def test_drafters_get_the_cores_that_the_target_leaves_over(
    target: dict[str, Any], asked: int | None, cores: int, allowed: int
) -> None:
    config = FlotillaConfig(
        target=TargetConfig(path="zoo:target-8x384", **target),
        drafters=(PromptLookupConfig(),),
        scheduler=SchedulerConfig(draft_ahead=asked),
    )
    assert settle_draft_ahead(config, cores).scheduler.draft_ahead == allowed
