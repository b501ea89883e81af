"""Bodies of the OpenAI-compatible requests: strict types, bounded values, unknown fields refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from cluster.tier_config import Target
from deployments.errors import ApiError, bad_request, from_validation
from deployments.schema_values import (
    MAX_INT64,
    MAX_LOGPROBS,
    LatencyTarget,
    LogitBias,
    MessageText,
    Prompts,
    StopStrings,
    TokenId,
)

#: OpenAI and vLLM fields this server has no use for, with the values that ask for nothing. Clients send
#: them at their defaults, and that is fine; any other value would be ignored silently, so it is refused.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "suffix": (None, ""),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    "store": (None, False),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "prompt_logprobs": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "truncate_prompt_tokens": (None,),
    "continue_final_message": (None, False),
    "spaces_between_special_tokens": (None, True),
    "logits_processors": (None, []),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "documents": (None, []),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "return_tokens_as_token_ids": (None, False),
    "cache_salt": (None,),
    "kv_transfer_params": (None,),
    "vllm_xargs": (None, {}),
}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class SloFields(_Strict):
    """Latency objectives: milliseconds, or a multiple such as "1.2x" of what one request by itself takes."""

    tpot_ms: LatencyTarget | None = Field(None, description="Mean time per output token.")
    ttft_ms: LatencyTarget | None = Field(None, description="Time to the first token.")
    e2e_ms: LatencyTarget | None = Field(None, description="Time to the last token.")
    on_miss: Literal["serve", "downgrade", "reject"] | None = Field(
        None, description="What is done if it is predicted to miss; the tier's rule if unset."
    )

    @property
    def targets(self) -> dict[str, Target | None]:
        """The objectives by name."""
        return {"tpot_ms": self.tpot_ms, "ttft_ms": self.ttft_ms, "e2e_ms": self.e2e_ms}


class SpeculationFields(_Strict):
    """What speculation may do for the request."""

    mode: Literal["auto", "off"] | None = Field(None, description="`off` decodes without drafts.")
    drafters: list[Annotated[str, Field(max_length=128)]] | None = Field(
        None, max_length=64, description="Drafters it may use; all if unset."
    )
    max_tokens: int | None = Field(None, ge=0, le=1024, description="Most draft tokens verified per step.")


class StreamOptions(_Strict):
    """OpenAI's and vLLM's options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Accepted and not used.")
    continuous_usage_stats: bool | None = Field(None, description="Token counts so far in every chunk.")


class GenerationRequest(_Strict):
    """Fields common to completions and chat; null is the same as leaving a field out."""

    model: str | None = Field(None, description="The served model's id; the only one if unset.")
    max_tokens: int | None = Field(None, ge=1, le=1 << 24)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 24, description="0 and -1 keep all tokens.")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: LogitBias = Field(default_factory=dict)
    seed: int | None = Field(None, ge=-MAX_INT64, le=MAX_INT64)
    n: int | None = Field(None, ge=1, le=8)
    stop: StopStrings = ()
    stop_token_ids: list[TokenId] | None = Field(None, max_length=64)
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=1 << 24)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = Field(None, description="Also return `token_ids` and the prompt's.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    slo: SloFields | None = None
    speculation: SpeculationFields | None = None
    priority: int | None = Field(None, ge=-(1 << 31), lt=1 << 31, description="Lower is earlier.")
    service_tier: str | None = Field(None, max_length=64)
    request_id: str | None = Field(None, min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")
    user: str | None = Field(None, description="Accepted and not used.")
    metadata: dict[str, str] | None = Field(None, description="Accepted and not used.")
    safety_identifier: str | None = Field(None, description="Accepted and not used.")
    prompt_cache_key: str | None = Field(
        None, description="Accepted and not used: prefixes are shared anyway."
    )

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_tokens(self) -> bool:
        """Whether every chunk of the stream tells the token counts so far."""
        return self.includes_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    prompt: Prompts
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None


class ChatMessage(_Strict):
    """One message; the fields of a replayed assistant message are accepted when empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: MessageText
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ChatRequest(GenerationRequest):
    """Body of `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 24)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None


RequestType = TypeVar("RequestType", bound=GenerationRequest)


def parse(body: bytes, request_type: type[RequestType]) -> RequestType:
    """The request in a body; raises `ApiError` (400) that names the field at fault."""
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(data, dict):
        raise bad_request("The request body must be a JSON object.", code="invalid_json")
    for name in data.keys() & NEUTRAL_VALUES.keys():
        value = data.pop(name)
        # `1 == True` in Python: compare types as well, so that `best_of: true` is refused.
        if not any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL_VALUES[name]):
            raise ApiError(
                400,
                f"`{name}` is not supported by this server; leave it out.",
                param=name,
                code="unsupported_parameter",
            )
    try:
        request = request_type.model_validate(data)
    except ValidationError as error:
        raise from_validation(error) from None
    check_combination(request)
    return request


def check_combination(request: GenerationRequest) -> None:
    """Refuse fields that contradict each other."""
    if request.stream_options is not None and not request.stream:
        raise bad_request("`stream_options` needs `stream` to be true.", "stream_options")
    if isinstance(request, ChatRequest):
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_request("`top_logprobs` needs `logprobs` to be true.", "top_logprobs")
        limits = {request.max_tokens, request.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise bad_request("Give `max_completion_tokens` or `max_tokens`, not both.", "max_tokens")
    elif isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        raise bad_request(
            "`echo` together with `logprobs` would need the prompt's log-probabilities, which this server "
            "does not compute; leave one of them out.",
            "echo",
        )
