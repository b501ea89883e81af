"""Configuration of a cell and its front ends: one typed tree, the same for YAML and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from cluster.adapter_config import AdapterConfig, check_adapters
from cluster.admission_config import AdmissionConfig
from cluster.config_names import BatchingName, PolicyName, SelectorName
from cluster.device_config import DeviceConfig, MaxModelLen, NumSlots
from cluster.drafter_config import BesideTargetConfig, DrafterConfig, check_shares
from cluster.fairness_config import FairnessConfig
from cluster.grpc_config import GrpcConfig
from cluster.health_config import HealthConfig
from cluster.http_config import HttpConfig as HttpConfig
from cluster.idempotency_config import IdempotencyConfig
from cluster.observability_config import DebugConfig, LogConfig, MetricsConfig, TelemetryConfig
from cluster.parser_names import ReasoningParserName, ToolParserName
from cluster.placement_config import StrictModel, TargetPlacementConfig
from cluster.pool_config import PoolConfig
from cluster.scaling_config import ScalingConfig
from cluster.security_config import SecurityConfig
from cluster.strict_yaml import load_yaml
from cluster.template_config import TemplateVariables
from cluster.tier_config import Tiers


class TargetConfig(DeviceConfig):
    """The target model and how it is run."""

    path: str = Field(description="Hugging Face directory, or `zoo:NAME` for an embedded demo model.")
    served_name: str | None = Field(
        default=None, description="Model id in the API; the directory's name if unset."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="What is computed in, and the KV cache. On a CPU, half-precision weights stay so.",
    )
    tensor_parallel: int = Field(default=1, ge=1, le=64, description="Ranks, one Ray actor each.")
    num_slots: NumSlots = Field(
        default=32768, description="Tokens the KV pool holds; `auto` is as many as fit on the GPU."
    )
    max_model_len: MaxModelLen | None = Field(
        default=None,
        description="Longest sequence, prompt and output; the model's own if unset, which is the most but "
        "where `rope_scaling` (yarn, linear) stretches it. Needed for models with LongRoPE, where their "
        "`original_max_position_embeddings` is the most, and [some](models.md) with sliding windows.",
    )
    runner: Literal["auto", "hf", "lean"] = Field(
        default="auto",
        description="`lean` runs the Llama family, `hf` the other decoders of Transformers, slower "
        "([which](models.md)). `auto` is `lean` where it can be.",
    )
    attention: Literal["padded", "decomposed", "flashinfer", "triton", "auto"] | None = Field(
        default=None,
        description="How requests of different lengths share a forward: `padded` in groups of like length, "
        "`decomposed` in pieces of one length (SPIN), `flashinfer` and `triton` without padding (CUDA), "
        "`auto` by predicted cost, on CUDA `triton`, or `flashinfer` where there is none. Unset: "
        "`padded` on a CPU, `auto` on CUDA.",
    )
    prefix_sharing: bool = Field(
        default=True, description="Prompts with a common beginning share its keys and values."
    )
    heads: str | None = Field(
        default=None,
        description="Decoding heads or EAGLE layer beside it; if unset, what a drafter of these names.",
    )
    adapters: tuple[AdapterConfig, ...] = Field(
        default=(), description="LoRA adapters, each a model of its own to clients ([adapters](adapters.md))."
    )
    sampling_defaults: Literal["model", "openai"] = Field(
        default="model",
        description="What requests get that name no `temperature`, `top_p`, `top_k`, `min_p` or "
        "`repetition_penalty`: `model` what its `generation_config.json` recommends, as vLLM and SGLang do, "
        "`openai` the temperature 1 and nothing cut off.",
    )
    default_max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Output tokens at most of a chat or a response whose request names no bound; as many as "
        "the context window leaves if unset, as in vLLM. Completions have OpenAI's 16.",
    )
    tool_parser: ToolParserName = Field(
        default="auto",
        description="In which [form](models.md#calls-of-tools) the model writes calls of tools; `auto`: as "
        "its chat template shows. With `none`, as where that shows none of these, tools are refused unless a "
        "call is forced.",
    )
    reasoning_parser: ReasoningParserName = Field(
        default="auto",
        description="How the model [marks](models.md#thoughts) what it thinks before it answers; `auto`: as "
        "its chat template shows; `none` leaves it in the text.",
    )
    chat_template_kwargs: TemplateVariables = Field(
        default={},
        description="Variables of the chat template, such as `{enable_thinking: false}`; those of a request "
        "count before.",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python code that comes with the target's directory, as its own user and unchecked "
        "(docs/security.md).",
    )
    placement: TargetPlacementConfig = Field(
        default=TargetPlacementConfig(), description="Where each rank runs."
    )

    @property
    def model_id(self) -> str:
        """What the target is called in the API."""
        return self.served_name or Path(self.path.removeprefix("zoo:")).name

    @model_validator(mode="after")
    def _has_distinct_names(self) -> TargetConfig:
        check_adapters(self.adapters, self.model_id)
        return self


class PolicyConfig(StrictModel):
    """Which speculation policy runs, and its bounds."""

    name: PolicyName = Field(
        default="flotilla",
        description="See [policies](policies.md); or the import path of [your own](policies.md#your-own).",
    )
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
        default=0.5,
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
    smartspec_ahead: bool = Field(
        default=False,
        description="Lengths of `smartspec` are planned while the target works on the step before, from "
        "estimates a step old, and chains of EAGLE or heads are sent ahead. The paper plans with the answer.",
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> PolicyConfig:
        if 0 < self.max_depth < self.min_depth:
            raise ValueError(f"min_depth {self.min_depth} is above max_depth {self.max_depth}")
        if self.smartspec_ahead and self.smartspec_acceptance == "confidence":
            raise ValueError(
                "smartspec_ahead cannot go with smartspec_acceptance `confidence`, which shortens drafts "
                "that it has seen; take `global` or `request`"
            )
        return self

    @property
    def deepest(self) -> int:
        """Most layers that the policy ever drafts: two of them have a depth of their own."""
        own = {"fixed": self.fixed_depth, "specinfer": len(self.expansion)}
        return own.get(self.name, self.max_depth)


class SelectorConfig(StrictModel):
    """Which drafter serves which request (SPIN section IV)."""

    name: SelectorName = Field(
        default="flotilla",
        description="See [selectors](selection.md); or the import path of [your own](selection.md#your-own).",
    )
    alpha: int = Field(default=16, ge=1, description="Slots (verify steps) `lbss` explores in each epoch.")
    beta: int = Field(
        default=4, ge=1, description="Slots that `lbss` leaves an exploring request on one drafter."
    )
    switch_cost: float = Field(
        default=1.0,
        ge=0,
        description="SPIN's lambda: what rebuilding keys and values counts for in the regret that `lbss` "
        "keeps; it decides nothing.",
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
        description="While the target verifies, idle drafters build keys and values of requests about to "
        "move to them (SPIN section IV-C).",
    )
    seed: int = Field(default=0, ge=0, description="Of the randomness in exploring.")

    @model_validator(mode="after")
    def _has_whole_chunk(self) -> SelectorConfig:
        if self.beta > self.alpha:
            raise ValueError(f"beta {self.beta} is above alpha {self.alpha}")
        return self


class SchedulerConfig(StrictModel):
    """Batching and queue bounds."""

    batching: BatchingName = Field(
        default="flotilla", description="Who is admitted, decodes and is prefilled; see cluster/batching."
    )
    max_running: int = Field(default=64, ge=1, description="Requests decoded at once.")
    max_waiting: int = Field(default=256, ge=1, description="Requests queued before 429.")
    prefill_chunk: Annotated[int, Field(ge=8)] | Literal["auto"] = Field(
        default="auto",
        description="Most prompt tokens per verify step, where prompts are cut into chunks. `auto` takes as "
        "many as cost some five plain steps by the profile: 128 on a small CPU, 1024 for 8B on an H200.",
    )
    max_whole_tokens: int = Field(
        default=2048,
        ge=8,
        description="The same where prompts are prefilled whole (vLLM's max_num_batched_tokens); a longer "
        "one is prefilled by itself.",
    )
    ageing_ms: float = Field(
        default=30000.0,
        gt=0,
        description="Waiting so long lifts a request by a priority level in `flotilla`.",
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
    async_scheduling: bool = Field(
        default=True,
        description="While nobody is drafted for, or only the target's own EAGLE layer or heads draft, the "
        "next call is sent before the one at hand is answered: the target does not wait for the scheduler.",
    )
    busy_polling: bool | Literal["auto"] = Field(
        default="auto",
        description="Scheduler and workers look for messages without pause while the cell works, in place of "
        "sleeping until one comes. Each takes a processor core then. auto: where the target is on GPUs.",
    )


class FlotillaConfig(StrictModel):
    """A cell and its front ends."""

    target: TargetConfig = Field(description="The model that decides every token.")
    drafters: tuple[DrafterConfig, ...] = Field(default=(), description="Who proposes; may be empty.")
    pool: PoolConfig = Field(default=PoolConfig(), description="How workers are placed and watched.")
    policy: PolicyConfig = Field(default=PolicyConfig(), description="How drafts are shaped and chosen.")
    selector: SelectorConfig = Field(
        default=SelectorConfig(), description="Which drafter serves which request."
    )
    scheduler: SchedulerConfig = Field(default=SchedulerConfig(), description="Batching and queues.")
    admission: AdmissionConfig = Field(
        default=AdmissionConfig(), description="Whether requests are taken, downgraded or refused."
    )
    fairness: FairnessConfig = Field(
        default=FairnessConfig(), description="What competing API keys get of a cell."
    )
    tiers: Tiers = Field(
        default_factory=dict, description="Objectives by tier name, of at most 64 characters."
    )
    http: HttpConfig = Field(default=HttpConfig(), description="Where the API listens.")
    idempotency: IdempotencyConfig = Field(
        default=IdempotencyConfig(), description="Requests sent again are answered once."
    )
    security: SecurityConfig = Field(default=SecurityConfig(), description="Who may use it.")
    metrics: MetricsConfig = Field(default=MetricsConfig(), description="Where Prometheus scrapes.")
    log: LogConfig = Field(default=LogConfig(), description="What is logged, and how.")
    telemetry: TelemetryConfig = Field(default=TelemetryConfig(), description="Traces of requests.")
    grpc: GrpcConfig = Field(default=GrpcConfig(), description="The same API over gRPC.")
    scaling: ScalingConfig = Field(
        default=ScalingConfig(), description="How many cells, front ends and drafters."
    )
    health: HealthConfig = Field(
        default=HealthConfig(), description="When a process that does not answer is replaced."
    )
    debug: DebugConfig = Field(default=DebugConfig(), description="Records of the scheduler's decisions.")
    profile: str | None = Field(
        default=None, description="Cost profile (JSON of `flotilla profile`); measured at start if unset."
    )

    @property
    def is_busy_polling(self) -> bool:
        """`scheduler.busy_polling`, decided where it is `auto`."""
        asked = self.scheduler.busy_polling
        return self.target.placement.num_gpus > 0 if asked == "auto" else asked

    @model_validator(mode="before")
    @classmethod
    def _run_heads_beside_target(cls, data: Any) -> Any:
        """The target is told of the heads, or the EAGLE layer, that a drafter names: they run beside it."""
        if not isinstance(data, dict):
            return data
        drafters = data.get("drafters")
        paths = [
            _value(drafter, "path")
            for drafter in (drafters if isinstance(drafters, list | tuple) else ())
            if _value(drafter, "kind") in ("heads", "eagle")
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
            if isinstance(drafter, BesideTargetConfig) and drafter.path != self.target.heads:
                raise ValueError(
                    f"drafter `{drafter.name}` names {drafter.path}, and beside the target runs "
                    f"{self.target.heads}: one set of heads, or one EAGLE layer, per target"
                )
        return self

    @model_validator(mode="after")
    def _shares_the_targets_gpu(self) -> FlotillaConfig:
        check_shares(self.target, self.target.placement.num_gpus, self.drafters)
        return self

    @model_validator(mode="after")
    def _encrypts_all_or_nothing(self) -> FlotillaConfig:
        if self.http.tls_certificate is not None and self.grpc.enabled and not self.grpc.direct:
            raise ValueError(
                "Ray Serve's gRPC proxy cannot serve with TLS, and http.tls_certificate asks for it: "
                "set grpc.direct: true"
            )
        return self

    @model_validator(mode="after")
    def _administers_one_cell(self) -> FlotillaConfig:
        if self.http.admin and self.scaling.cells.max > 1:
            raise ValueError(
                "http.admin changes the drafters of one cell, and scaling.cells.max allows several: "
                "switch it off, or let scaling.drafters change the drafters of each"
            )
        return self

    @field_validator("drafters")
    @classmethod
    def _distinct(cls, drafters: tuple[DrafterConfig, ...]) -> tuple[DrafterConfig, ...]:
        names = [drafter.name for drafter in drafters]
        if len(set(names)) != len(names):
            raise ValueError(f"drafter names must differ: {sorted(names)}")
        return drafters

    @classmethod
    def load(cls, path: Path) -> FlotillaConfig:
        """Read a YAML file; errors name the field and what it may be."""
        return cls.model_validate(load_yaml(path.read_text()) or {})


def _value(part: Any, name: str) -> Any:
    """A field of a part that may be raw or validated already."""
    return part.get(name) if isinstance(part, dict) else getattr(part, name, None)
