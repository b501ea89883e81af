"""Configuration of where workers run and what Ray reserves for them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, field_validator

#: What Ray counts by itself: it refuses them among custom resources, with an error about its own arguments.
_RESERVED = ("CPU", "GPU", "memory", "object_store_memory")
#: Digits after the point with which Ray counts resources; it refuses more.
_DIGITS = 4


def _are_custom(resources: dict[str, float]) -> dict[str, float]:
    for name, amount in resources.items():
        if name in _RESERVED:
            raise ValueError(
                f"`{name}` is not a custom resource: CPUs and GPUs are reserved with `num_cpus` and "
                "`num_gpus`, memory cannot be"
            )
        if round(amount, _DIGITS) != amount:
            raise ValueError(f"the amount of `{name}` must be a multiple of 0.0001, as finely as Ray counts")
    return resources


#: Amounts by name.
CustomResources = Annotated[dict[str, Annotated[FiniteFloat, Field(gt=0)]], AfterValidator(_are_custom)]


class StrictModel(BaseModel):
    """Unknown fields are errors, and nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ResourcesConfig(StrictModel):
    """What Ray reserves for one worker, and on which nodes it may run."""

    num_cpus: FiniteFloat = Field(default=0.0, ge=0, description="Ray CPUs reserved.")
    num_gpus: FiniteFloat = Field(
        default=0.0, ge=0, description="Ray GPUs reserved; below 1 a share of one device, memory not divided."
    )
    resources: CustomResources = Field(default_factory=dict, description="Custom Ray resources reserved.")
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Ray node labels it needs: `value`, `!value`, `in(a,b)` or `!in(a,b)` by label.",
    )

    @field_validator("num_gpus")
    @classmethod
    def _whole_devices(cls, num_gpus: float) -> float:
        if num_gpus > 1 and num_gpus != int(num_gpus):
            raise ValueError("a share of a GPU is below 1, more than one are whole GPUs")
        return num_gpus


class TargetPlacementConfig(ResourcesConfig):
    """Where the target's ranks run, and what is reserved for each."""

    num_cpus: FiniteFloat = Field(default=1.0, ge=0, description="Ray CPUs reserved.")


class PlacementConfig(ResourcesConfig):
    """Where a drafter runs, and what is reserved for each instance."""

    collocate: Literal["target", "anywhere", "own-node"] = Field(
        default="anywhere",
        description="`target`: on the node of the target's first rank; `own-node`: where no other worker of "
        "the cell is.",
    )


class ReplicaPlacementConfig(StrictModel):
    """What Ray reserves for the process of a cell or of a front end itself, and so where it may run."""

    num_cpus: FiniteFloat = Field(
        default=0.0,
        ge=0,
        description="Ray CPUs reserved for each; while one replaces another, for both.",
    )
    resources: CustomResources = Field(
        default_factory=dict,
        description="Custom Ray resources reserved for each: 0.001 of one has it run where that is. Without, "
        "and without CPUs, Ray may start it on any node, its head too.",
    )
