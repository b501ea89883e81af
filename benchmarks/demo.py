"""The cell that benchmarks run when no configuration file is given: the whole embedded demo family."""

from __future__ import annotations

from pathlib import Path

from cluster.config import FlotillaConfig, ModelDrafterConfig, PromptLookupConfig, TargetConfig
from zoo.registry import DRAFTERS, TARGET, weights_dir

# The drafter that peers, which can use only one, are given: the one that is trained on everything.
GENERAL_DRAFTER = next(name for name in DRAFTERS if "general" in name)


def load_config(path: Path | None) -> FlotillaConfig:
    """The configuration in a file, or that of the demo family."""
    if path is not None:
        return FlotillaConfig.load(path)
    return FlotillaConfig(
        target=TargetConfig(path=f"zoo:{TARGET}"),
        drafters=(
            *(ModelDrafterConfig(name=name, path=f"zoo:{name}") for name in DRAFTERS),
            PromptLookupConfig(),
        ),
    )


def directory(path: str) -> str:
    """The Hugging Face directory of `zoo:NAME`, or the path as it is."""
    return str(weights_dir(path.removeprefix("zoo:"))) if path.startswith("zoo:") else path
