"""The cell that benchmarks run when no configuration file is given: the whole embedded demo family."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cluster.config import FlotillaConfig
from cluster.config_errors import wrong_fields
from cluster.drafter_config import EagleConfig, HeadsConfig, ModelDrafterConfig, SuffixAutomatonConfig
from cluster.model_paths import adapter_directory
from deployments.demo import demo_config
from zoo.registry import DRAFTERS, EAGLE, HEADS, OTHER_VOCABULARY, weights_dir

# The drafter that peers, which can use only one, are given: the one that is trained on everything.
GENERAL_DRAFTER = next(name for name in DRAFTERS if "general" in name)


def load_config(path: Path | None) -> FlotillaConfig:
    """The configuration in a file, or that of the demo family.

    Raises:
        ValueError: for a file that cannot be read, or is no configuration, in words for people.
    """
    if path is None:
        return demo_config()
    try:
        return FlotillaConfig.load(path)
    except ValidationError as error:
        lines = wrong_fields(error, whole="configuration", model=FlotillaConfig)
        raise ValueError("\n  ".join([f"{path}: the configuration is wrong", *lines])) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None


def changed(config: FlotillaConfig, **sections: Mapping[str, Any]) -> FlotillaConfig:
    """The configuration with other fields in some of its sections.

    Raises:
        ValueError: for what is no configuration then, in words for people.
    """
    raw = config.model_dump()
    for name, fields in sections.items():
        raw[name] |= fields
    return validated(raw)


def validated(raw: Mapping[str, Any]) -> FlotillaConfig:
    """The configuration of such fields.

    Raises:
        ValueError: for what is none, in words for people.
    """
    try:
        return FlotillaConfig.model_validate(raw)
    except ValidationError as error:
        raise ValueError(
            "; ".join(wrong_fields(error, whole="configuration", model=FlotillaConfig))
        ) from None


def every_kind() -> FlotillaConfig:
    """The demo family with a suffix automaton in place of prompt lookup, and decoding heads."""
    demo = demo_config()
    models = tuple(drafter for drafter in demo.drafters if drafter.kind == "model")
    return demo.model_copy(update={"drafters": (*models, SuffixAutomatonConfig(), heads())})


def eagle() -> EagleConfig:
    """The demo target's EAGLE layer."""
    return EagleConfig(path=f"zoo:{EAGLE}")


def heads() -> HeadsConfig:
    """The demo target's decoding heads."""
    return HeadsConfig(path=f"zoo:{HEADS}")


def other_vocabulary() -> ModelDrafterConfig:
    """The demo family's drafter with a tokenizer of its own."""
    return ModelDrafterConfig(name="other-vocabulary", path=f"zoo:{OTHER_VOCABULARY[0]}")


def directory(path: str) -> str:
    """The Hugging Face directory of `zoo:NAME`, or the path as it is.

    Raises:
        ValueError: if the family has no model of that name.
    """
    if not path.startswith("zoo:"):
        return path
    try:
        return str(weights_dir(path.removeprefix("zoo:")))
    except KeyError as error:
        raise ValueError(error.args[0]) from None


def adapter(path: str) -> Path:
    """The directory of a LoRA adapter, `zoo:NAME` or a path.

    Raises:
        ValueError: if the family has none of that name.
        FileNotFoundError: if there is none.
    """
    return adapter_directory(directory(path))


def keeping_nothing(config: FlotillaConfig) -> FlotillaConfig:
    """The same cell, which finds nothing of one request in another.

    Where contenders are asked the same prompts in turn, whoever comes later would find them read, and a
    suffix automaton would draft the very answers that it saw when another contender was asked.
    """
    raw = config.model_dump()
    raw["target"]["prefix_sharing"] = False
    for drafter in raw["drafters"]:
        if "prefix_sharing" in drafter:
            drafter["prefix_sharing"] = False
        if "scope" in drafter:
            drafter["scope"] = "request"
    return FlotillaConfig.model_validate(raw)
