"""Configuration of drafters: one class for each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from cluster.device_config import DeviceConfig, MaxModelLen, NumSlots
from cluster.placement_config import PlacementConfig, StrictModel

#: Names that stand for something else in metrics, receipts, traces and cost profiles.
_TAKEN_NAMES = {
    "verifier": "the target's worker",
    "target": "the target in metrics and cost profiles",
    "grammar": "what drafts the tokens that a structured output leaves no choice about",
}


def _is_free(name: str) -> str:
    if name in _TAKEN_NAMES:
        raise ValueError(f"`{name}` names {_TAKEN_NAMES[name]}; call the drafter something else")
    return name


#: Names of drafters: `/` is left for their instances.
DrafterName = Annotated[str, Field(pattern=r"^[^/]+$"), AfterValidator(_is_free)]


class PooledConfig(StrictModel):
    """What every drafter of the pool has, of whatever kind."""

    replicas: int = Field(
        default=1, ge=1, le=64, description="Instances: called `NAME` if one, else `NAME/0`, `NAME/1`, ..."
    )
    placement: PlacementConfig = Field(default=PlacementConfig(), description="Where each instance runs.")

    @property
    def runs_beside_target(self) -> bool:
        """Whether it is part of the target's process, and so loaded with it."""
        return False


class BesideTargetConfig(PooledConfig):
    """What drafters that run in the target's process have in common."""

    name: DrafterName
    path: str
    max_requests: int = Field(default=256, ge=1, description="Requests an instance serves at once.")

    @property
    def runs_beside_target(self) -> bool:
        """See `PooledConfig`."""
        return True

    @model_validator(mode="after")
    def _runs_with_the_target(self) -> Self:
        if self.placement != PlacementConfig():
            raise ValueError(
                f"`placement` of drafter `{self.name}` cannot be chosen: it runs in the target's "
                "process; leave it out, and set target.placement"
            )
        return self


class ModelDrafterConfig(PooledConfig, DeviceConfig):
    """A small causal language model as drafter."""

    kind: Literal["model"] = Field(default="model", description="A model drafter.")
    name: DrafterName = Field(description="Name in receipts and metrics.")
    path: str = Field(description="Hugging Face directory, or `zoo:NAME`.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="What is computed in, and the KV cache. On a CPU, half-precision weights stay so.",
    )
    num_slots: NumSlots = Field(
        default=32768, description="Tokens its KV pool holds; `auto` as for the target."
    )
    max_model_len: MaxModelLen | None = Field(
        default=None, description="As for the target; longer requests get no drafts from it."
    )
    runner: Literal["auto", "hf", "lean"] = Field(default="auto", description="As for the target.")
    attention: Literal["padded", "decomposed", "flashinfer", "triton", "auto"] | None = Field(
        default=None, description="As for the target."
    )
    prefix_sharing: bool = Field(default=True, description="As for the target.")
    retokenize: bool = Field(
        default=True,
        description="With another tokenizer than the target's it drafts by retokenization, through text; off "
        "refuses it.",
    )
    max_requests: int = Field(
        default=64, ge=1, description="Capacity: requests an instance serves at once (SPIN's B_j)."
    )


class PromptLookupConfig(PooledConfig):
    """Drafts what followed the same n-gram earlier in the request."""

    kind: Literal["prompt_lookup"] = Field(default="prompt_lookup", description="Prompt lookup.")
    name: DrafterName = Field(default="prompt-lookup", description="Name in receipts and metrics.")
    max_ngram: int = Field(default=4, ge=1, le=16, description="Longest suffix looked up.")
    min_ngram: int = Field(default=2, ge=1, le=16, description="Shortest suffix looked up.")
    max_requests: int = Field(default=256, ge=1, description="Requests an instance serves at once.")

    @model_validator(mode="after")
    def _ordered(self) -> PromptLookupConfig:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}")
        return self


class SuffixAutomatonConfig(PooledConfig):
    """Drafts what followed the longest suffix seen before, in the request or in recent outputs of others."""

    kind: Literal["suffix_automaton"] = Field(default="suffix_automaton", description="A suffix automaton.")
    name: DrafterName = Field(default="suffix-automaton", description="Name in receipts and metrics.")
    max_match: int = Field(default=24, ge=1, le=256, description="Longest suffix looked up, in tokens.")
    min_match: int = Field(default=2, ge=1, le=256, description="Shortest suffix looked up, in tokens.")
    scope: Literal["request", "cell"] = Field(
        default="cell",
        description="`cell` searches recent outputs of all requests too, which influences speed and never "
        "text; `request` shares nothing between requests.",
    )
    capacity: int = Field(
        default=65536, ge=2, description="Tokens of recent outputs remembered, at most; about 500 bytes each."
    )
    max_requests: int = Field(default=256, ge=1, description="Requests an instance serves at once.")

    @model_validator(mode="after")
    def _ordered(self) -> SuffixAutomatonConfig:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match {self.min_match} is above max_match {self.max_match}")
        return self


class OwnDrafterConfig(PooledConfig):
    """A drafter of yours: any class that proposes tokens."""

    kind: Literal["own"] = Field(default="own", description="A class of yours (docs/drafters.md).")
    name: DrafterName = Field(description="Name in receipts and metrics.")
    import_path: str = Field(
        pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)+$",
        description="Dotted path of the class, as `my_drafters.Repeats`; its module must be installed, or "
        "lie in a directory on PYTHONPATH, wherever an instance runs.",
    )
    options: dict[str, Any] = Field(default={}, description="For the class, which is called with them.")
    max_depth: int = Field(default=16, ge=1, le=16, description="Deepest draft.")
    max_width: int = Field(default=16, ge=1, le=16, description="Widest beam.")
    max_requests: int = Field(default=256, ge=1, description="Requests an instance serves at once.")


class HeadsConfig(BesideTargetConfig):
    """Medusa-style heads on the target's hidden states; they run in the target's process."""

    kind: Literal["heads"] = Field(default="heads", description="Decoding heads of the target.")
    name: DrafterName = Field(default="heads", description="Name in receipts and metrics.")
    path: str = Field(description="Directory of the heads, or `zoo:NAME`; they fit one target only.")
    num_candidates: int = Field(
        default=4, ge=1, le=16, description="Best tokens of each head that trees are made of."
    )


class EagleConfig(BesideTargetConfig):
    """An EAGLE-3 draft layer on the target's hidden states; it runs in the target's process."""

    kind: Literal["eagle"] = Field(default="eagle", description="EAGLE-3.")
    name: DrafterName = Field(default="eagle", description="Name in receipts and metrics.")
    path: str = Field(
        description="Directory as of the EAGLE repository or the speculators library, or `zoo:NAME`; it fits "
        "one target only."
    )
    max_depth: int = Field(default=6, ge=1, le=16, description="Deepest draft.")
    max_width: int = Field(default=4, ge=1, le=16, description="Widest beam.")


DrafterConfig = Annotated[
    ModelDrafterConfig
    | PromptLookupConfig
    | SuffixAutomatonConfig
    | HeadsConfig
    | EagleConfig
    | OwnDrafterConfig,
    Field(discriminator="kind"),
]


def check_shares(target: DeviceConfig, target_gpus: float, drafters: Sequence[DrafterConfig]) -> None:
    """Whether each model that is to be beside a target on a GPU says on which device it runs.

    Raises:
        ValueError: if one would run on the CPU of a node with GPUs without having been told so.
    """
    if target.device == "cpu" or not target_gpus:
        return
    for drafter in drafters:
        if not isinstance(drafter, ModelDrafterConfig) or drafter.device != "auto":
            continue
        if drafter.placement.collocate == "target" and not drafter.placement.num_gpus:
            raise ValueError(
                f"drafter `{drafter.name}` has `collocate: target` and no share of the target's GPU, so it "
                "would run on the CPU: set `placement.num_gpus` of both, shares that sum to at most 1 such "
                "as 0.8 and 0.2, or `device: cpu`"
            )
