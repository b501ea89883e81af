"""Configuration of a cell and its front ends: one typed tree, the same for YAML and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class _Strict(BaseModel):
    """Unknown fields are errors, and nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ResourcesConfig(_Strict):
    """What Ray reserves for one worker, and on which nodes it may run."""

    num_cpus: float = Field(default=0.0, ge=0, description="Ray CPUs reserved.")
    num_gpus: float = Field(
        default=0.0, ge=0, description="Ray GPUs reserved; below 1 a share of one device, memory not divided."
    )
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="Custom Ray resources reserved."
    )
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

    num_cpus: float = Field(default=1.0, ge=0, description="Ray CPUs reserved.")


class PlacementConfig(ResourcesConfig):
    """Where a drafter runs, and what is reserved for each instance."""

    collocate: Literal["target", "anywhere", "own-node"] = Field(
        default="anywhere",
        description="`target`: on the node of the target's first rank; `own-node`: where no other worker of "
        "the cell is.",
    )


class TargetConfig(_Strict):
    """The target model and how it is run."""

    path: str = Field(description="Hugging Face directory, or `zoo:NAME` for an embedded demo model.")
    served_name: str | None = Field(
        default=None, description="Model id in the API; the directory's name if unset."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Weights and KV cache."
    )
    tensor_parallel: int = Field(default=1, ge=1, le=64, description="Ranks, one Ray actor each.")
    num_slots: int = Field(default=32768, ge=64, description="Tokens the KV pool holds.")
    runner: Literal["auto", "hf", "lean"] = Field(
        default="auto", description="`hf` runs any architecture, `lean` the Llama family faster."
    )
    attention: Literal["padded", "decomposed", "auto"] = Field(
        default="padded",
        description="How requests of different lengths share a forward: `padded` in groups of like length, "
        "`decomposed` in pieces of one length (SPIN), `auto` by predicted cost.",
    )
    prefix_sharing: bool = Field(
        default=True, description="Prompts with a common beginning share its keys and values."
    )
    heads: str | None = Field(
        default=None, description="Decoding heads run beside it; those of the `heads` drafter if unset."
    )
    placement: TargetPlacementConfig = Field(
        default=TargetPlacementConfig(), description="Where each rank runs."
    )


#: Names of drafters: `/` is left for their instances.
DrafterName = Annotated[str, Field(pattern=r"^[^/]+$")]


class PooledConfig(_Strict):
    """What every drafter of the pool has, of whatever kind."""

    replicas: int = Field(
        default=1, ge=1, le=64, description="Instances: called `NAME` if one, else `NAME/0`, `NAME/1`, ..."
    )
    placement: PlacementConfig = Field(default=PlacementConfig(), description="Where each instance runs.")


class ModelDrafterConfig(PooledConfig):
    """A small causal language model as drafter."""

    kind: Literal["model"] = Field(default="model", description="A model drafter.")
    name: DrafterName = Field(description="Name in receipts and metrics.")
    path: str = Field(description="Hugging Face directory, or `zoo:NAME`.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Weights and KV cache."
    )
    num_slots: int = Field(default=32768, ge=64, description="Tokens its KV pool holds.")
    runner: Literal["auto", "hf", "lean"] = Field(default="auto", description="As for the target.")
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


class HeadsConfig(PooledConfig):
    """Medusa-style heads on the target's hidden states; they run in the target's process."""

    kind: Literal["heads"] = Field(default="heads", description="Decoding heads of the target.")
    name: DrafterName = Field(default="heads", description="Name in receipts and metrics.")
    path: str = Field(description="Directory of the heads, or `zoo:NAME`; they fit one target only.")
    num_candidates: int = Field(
        default=4, ge=1, le=16, description="Best tokens of each head that trees are made of."
    )
    max_requests: int = Field(default=256, ge=1, description="Requests an instance serves at once.")


DrafterConfig = Annotated[
    ModelDrafterConfig | PromptLookupConfig | SuffixAutomatonConfig | HeadsConfig,
    Field(discriminator="kind"),
]


class PoolConfig(_Strict):
    """How the cell's workers are placed and watched."""

    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        default="PACK", description="How Ray lays out what the target's ranks and the drafters reserve."
    )
    hang_timeouts: int = Field(
        default=3,
        ge=1,
        description="A drafter that has been silent for so many times `scheduler.draft_timeout_ms` while an "
        "answer is owed is killed and replaced.",
    )


class PolicyConfig(_Strict):
    """Which speculation policy runs, and its bounds."""

    name: str = Field(default="flotilla", description="See cluster/policies.")
    max_depth: int = Field(default=8, ge=0, le=32, description="Deepest draft (AdaServe's D_max).")
    min_depth: int = Field(default=1, ge=0, le=32, description="Shallowest draft (AdaServe's D_min).")
    max_width: int = Field(default=2, ge=1, le=16, description="Widest beam (AdaServe's W_max).")
    verify_budget: int | None = Field(
        default=None, ge=1, description="Tokens per verify step (B1); the measured knee if unset."
    )
    draft_budget: int = Field(default=6, ge=1, description="Beam tokens per draft step (B2).")
    depth_offset: float = Field(default=0.0, ge=0, description="AdaServe's c1.")
    width_offset: int = Field(default=0, ge=0, description="AdaServe's c2.")
    max_nodes: int = Field(
        default=16, ge=1, description="Nodes one request may take in the SLO phase (n_max)."
    )
    miss_probability: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="Chance of missing a TPOT objective that `flotilla` plans for; the smaller, the earlier "
        "a request gets more of a step.",
    )
    fixed_depth: int = Field(default=4, ge=0, le=32, description="Depth of the `fixed` policy.")
    expansion: tuple[Annotated[int, Field(ge=1, le=16)], ...] = Field(
        default=(1, 1, 3, 1, 1, 1, 1, 1),
        min_length=1,
        max_length=32,
        description="Children of each node, by layer, in the static tree of `specinfer`.",
    )
    confidence_threshold: float = Field(
        default=0.4,
        ge=0,
        le=1,
        description="Draft probability of a token below which `threshold`, and at or below which `smartspec` "
        "by confidence, ends a draft.",
    )
    smartspec_acceptance: Literal["global", "request", "confidence"] = Field(
        default="global", description="What `smartspec` predicts acceptance from."
    )


class SelectorConfig(_Strict):
    """Which drafter serves which request (SPIN section IV)."""

    name: str = Field(default="flotilla", description="See selector/registry.py.")
    alpha: int = Field(default=16, ge=1, description="Slots (verify steps) `lbss` explores in each epoch.")
    beta: int = Field(
        default=4, ge=1, description="Slots that `lbss` leaves an exploring request on one drafter."
    )
    switch_cost: float = Field(
        default=1.0,
        ge=0,
        description="Weight of rebuilding keys and values after a switch, against goodput (lambda).",
    )
    epsilon: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Share of slots in which `epsilon-greedy` tries a random drafter.",
    )
    drafters: tuple[str, ...] = Field(
        default=(), description="Drafters that `fixed` uses, by kind or instance; all if empty."
    )
    fast_switching: bool = Field(
        default=True,
        description="While the target verifies, idle drafters build keys and values of requests about to move "
        "to them (SPIN section IV-C).",
    )
    seed: int = Field(default=0, ge=0, description="Of the randomness in exploring.")

    @model_validator(mode="after")
    def _has_whole_chunk(self) -> SelectorConfig:
        if self.beta > self.alpha:
            raise ValueError(f"beta {self.beta} is above alpha {self.alpha}")
        return self


class SchedulerConfig(_Strict):
    """Batching and queue bounds."""

    batching: str = Field(
        default="flotilla", description="Who is admitted, decodes and is prefilled; see cluster/batching."
    )
    max_running: int = Field(default=64, ge=1, description="Requests decoded at once.")
    max_waiting: int = Field(default=256, ge=0, description="Requests queued before 429.")
    prefill_chunk: int = Field(
        default=128,
        ge=8,
        description="Most prompt tokens per verify step, where prompts are cut into chunks.",
    )
    max_whole_tokens: int = Field(
        default=2048,
        ge=8,
        description="The same where prompts are prefilled whole (vLLM's max_num_batched_tokens); a longer "
        "one is prefilled by itself.",
    )
    ageing_ms: float = Field(
        default=30000.0, gt=0, description="`flotilla` passes nobody over who has waited so long."
    )
    micro_batches: Annotated[int, Field(ge=1, le=8)] | Literal["auto", "spin"] = Field(
        default=1,
        description="Groups whose drafting and verification overlap. `spin` chooses their number by SPIN's "
        "heuristic from the cost profile; `auto` by predicted and measured goodput, and verifies together "
        "what is drafted where that pays.",
    )
    draft_ahead: int | None = Field(
        default=None,
        ge=0,
        description="Drafters that go on drafting while the target verifies; the cores the target leaves "
        "over if unset.",
    )
    draft_timeout_ms: float = Field(
        default=2000.0, gt=0, description="A drafter slower than this is left behind for the step."
    )


class TierConfig(_Strict):
    """Objectives of a service tier, used when a request names none."""

    tpot_ms: float | None = Field(default=None, gt=0, description="Mean time per output token, ms.")
    ttft_ms: float | None = Field(default=None, gt=0, description="Time to the first token, ms.")


class HttpConfig(_Strict):
    """Where the API listens."""

    host: str = Field(default="127.0.0.1", description="Loopback unless told otherwise.")
    port: int = Field(default=8000, ge=0, le=65535, description="0 takes any free port.")
    direct: bool = Field(
        default=True,
        description="Front ends listen on the port themselves; off puts Ray Serve's HTTP proxy in between.",
    )
    front_ends: int = Field(default=1, ge=1, description="Front-end replicas.")
    max_body_bytes: int = Field(default=1 << 20, ge=1024, description="Larger bodies get a 413.")
    admin: bool = Field(
        default=False,
        description="`/admin` changes the pool of drafters; it answers to clients on the same machine only.",
    )


class DebugConfig(_Strict):
    """A record of what was decided in each step; costs nothing while off."""

    decisions: int = Field(
        default=0, ge=0, le=100_000, description="Newest steps kept for `GET /debug/decisions`; 0 is off."
    )
    decisions_file: Path | None = Field(
        default=None, description="JSON lines to which every step is appended, for `flotilla replay`."
    )
    timeline: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Newest slices of work, of all workers, kept for `GET /debug/timeline`; 0 is off.",
    )


class FlotillaConfig(_Strict):
    """A cell and its front ends."""

    target: TargetConfig = Field(description="The model that decides every token.")
    drafters: tuple[DrafterConfig, ...] = Field(default=(), description="Who proposes; may be empty.")
    pool: PoolConfig = Field(default=PoolConfig(), description="How workers are placed and watched.")
    policy: PolicyConfig = Field(default=PolicyConfig(), description="How drafts are shaped and chosen.")
    selector: SelectorConfig = Field(
        default=SelectorConfig(), description="Which drafter serves which request."
    )
    scheduler: SchedulerConfig = Field(default=SchedulerConfig(), description="Batching and queues.")
    tiers: dict[str, TierConfig] = Field(default_factory=dict, description="Objectives by tier name.")
    http: HttpConfig = Field(default=HttpConfig(), description="Where the API listens.")
    debug: DebugConfig = Field(default=DebugConfig(), description="Records of the scheduler's decisions.")
    profile: str | None = Field(
        default=None, description="Cost profile (JSON of `flotilla profile`); measured at start if unset."
    )

    @model_validator(mode="before")
    @classmethod
    def _run_heads_beside_target(cls, data: Any) -> Any:
        """The target is told of the heads that a drafter names: their input is in its process."""
        if not isinstance(data, dict):
            return data
        drafters = data.get("drafters")
        paths = [
            _value(drafter, "path")
            for drafter in (drafters if isinstance(drafters, list | tuple) else ())
            if _value(drafter, "kind") == "heads"
        ]
        target = data.get("target")
        if paths and isinstance(target, dict) and target.get("heads") is None:
            return data | {"target": target | {"heads": paths[0]}}
        if paths and isinstance(target, TargetConfig) and target.heads is None:
            return data | {"target": target.model_copy(update={"heads": paths[0]})}
        return data

    @model_validator(mode="after")
    def _has_heads(self) -> FlotillaConfig:
        for drafter in self.drafters:
            if drafter.kind == "heads" and drafter.path != self.target.heads:
                raise ValueError(
                    f"drafter `{drafter.name}` names the heads {drafter.path}, and the target runs "
                    f"{self.target.heads}: one set of heads per target"
                )
        return self

    @field_validator("drafters")
    @classmethod
    def _distinct(cls, drafters: tuple[DrafterConfig, ...]) -> tuple[DrafterConfig, ...]:
        names = [drafter.name for drafter in drafters]
        if len(set(names)) != len(names):
            raise ValueError(f"drafter names must differ: {sorted(names)}")
        if "verifier" in names:
            raise ValueError("`verifier` names the target's worker; call the drafter something else")
        return drafters

    @classmethod
    def load(cls, path: Path) -> FlotillaConfig:
        """Read a YAML file; errors name the field and what it may be."""
        return cls.model_validate(yaml.safe_load(path.read_text()) or {})


def _value(part: Any, name: str) -> Any:
    """A field of a part that may be raw or validated already."""
    return part.get(name) if isinstance(part, dict) else getattr(part, name, None)
