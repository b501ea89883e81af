"""Configuration of the device a model runs on, and of the memory it takes there."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from cluster.placement_config import StrictModel

#: Tokens a KV pool holds, or as many as fit.
NumSlots = Annotated[int, Field(ge=64)] | Literal["auto"]

#: So long are the sequences of `engine.self_test` at least, without which no model is served.
LEAST_MODEL_LEN = 15
MaxModelLen = Annotated[int, Field(ge=LEAST_MODEL_LEN)]


class DeviceConfig(StrictModel):
    """Where a model's weights and KV cache lie; for a worker of a cell, with what Ray reserves for it."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="`auto` is the GPU that `placement.num_gpus` reserves, the CPU without one; `cuda` "
        "refuses to start without (docs/gpu.md).",
    )
    memory_fraction: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Share of the GPU's memory, or of the share reserved, that weights and KV may take "
        "together when `num_slots` is `auto`.",
    )

    quantization: Literal["fp8", "int4"] | None = Field(
        default=None,
        description="`fp8` rounds the weights of linear layers to eight bits when loading: on a GPU half "
        "their memory, measured 1.27 times as fast for one request and slower from 8 rows on; `int4` to "
        "four bits: a quarter, not measured yet; on a CPU neither saves anything. A target so rounded is "
        "another model, and its outputs are what no policy changes. Checkpoints that are quantized need "
        "nothing here (docs/gpu.md).",
    )
    cuda_graphs: bool = Field(
        default=True, description="Replay captured forwards on a GPU; off saves their memory."
    )

    @model_validator(mode="after")
    def _has_a_gpu(self) -> DeviceConfig:
        placement: Any = getattr(self, "placement", None)
        if self.device == "cuda" and placement is not None and not placement.num_gpus:
            raise ValueError(
                "`device: cuda` needs `placement.num_gpus`, 1 or a share such as 0.25: GPUs are hidden from "
                "workers that reserve none. To share the target's GPU, give both shares that sum to at most "
                "1, and the drafter `placement.collocate: target`"
            )
        return self

    @property
    def device_share(self) -> float:
        """Share of one GPU that is reserved for it; 1 if that is a whole one, or none."""
        placement: Any = getattr(self, "placement", None)
        reserved = float(placement.num_gpus) if placement is not None else 0.0
        return reserved if 0 < reserved < 1 else 1.0
