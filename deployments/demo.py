"""The configuration served when none is given: the embedded demo family with all its drafters."""

from __future__ import annotations

from cluster.config import FlotillaConfig, TargetConfig
from cluster.drafter_config import ModelDrafterConfig, PromptLookupConfig
from zoo.registry import DRAFTERS, TARGET


def demo_config() -> FlotillaConfig:
    """The zoo's target, its model drafters, and prompt lookup, which costs nothing."""
    models = [ModelDrafterConfig(name=name.removeprefix("drafter-"), path=f"zoo:{name}") for name in DRAFTERS]
    return FlotillaConfig(
        target=TargetConfig(path=f"zoo:{TARGET}", tool_parser="hermes"),
        drafters=(*models, PromptLookupConfig()),
    )
