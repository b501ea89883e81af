"""Configuration of the LoRA adapters that a target serves besides itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from cluster.placement_config import StrictModel


class AdapterConfig(StrictModel):
    """A LoRA adapter of the target, as PEFT saves it."""

    name: Annotated[str, Field(pattern=r"^[^\x00-\x20]+$", max_length=128)] = Field(
        description="What requests name as their `model` to be answered with it."
    )
    path: str = Field(description="Directory with `adapter_config.json`, or `zoo:NAME`.")


def check_adapters(adapters: Sequence[AdapterConfig], served_name: str) -> None:
    """Refuse names that do not tell models apart.

    Raises:
        ValueError: naming one.
    """
    names = [served_name, *(adapter.name for adapter in adapters)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"two models would be called `{name}`: give each of target.adapters a name of its own, other "
                "than the target's"
            )
