"""Bodies of the OpenAI-compatible requests: strict types, bounded values, unknown fields refused by name."""

from __future__ import annotations

import math
import re
from codecs import BOM_UTF8
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json

from cluster.tier_config import MOST_NAME_CHARACTERS, Target
from deployments.chat_messages import ChatMessage, check_messages
from deployments.errors import ApiError, bad_request, field_path, from_validation
from deployments.request_model import RequestModel
from deployments.schema_values import (
    MAX_INT64,
    MAX_LOGPROBS,
    BadWords,
    LatencyTarget,
    LogitBias,
    MinP,
    Prompts,
    RepetitionPenalty,
    RequestId,
    StopStrings,
    Temperature,
    TokenId,
    TopK,
    TopP,
)
from deployments.structured_outputs import StructuredFields
from deployments.tools import MAX_TOOLS, Tool, ToolChoice

#: OpenAI and vLLM fields this server has no use for, or not at every endpoint, with the values that ask for
#: nothing. Clients send them at their defaults, and that is fine; any other value would be ignored silently,
#: so it is refused.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "continue_final_message": (None, False),
    "chat_template_kwargs": (None, {}),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "moderation": (None,),
    "reasoning_effort": (None, "none"),
    "include_reasoning": (None, True),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "early_stopping": (None, False),
    "spaces_between_special_tokens": (None, True),
    "logits_processors": (None, []),
    "mm_processor_kwargs": (None, {}),
    "chat_template": (None,),
    "documents": (None, []),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "kv_transfer_params": (None,),
    "vllm_xargs": (None, {}),
    # What an answer must look like or is made of, or where it ends, to vLLM, SGLang and llama.cpp: left out,
    # it would be another's.
    "regex": (None,),
    "ebnf": (None,),
    "grammar": (None, ""),
    "json_schema": (None,),
    "stop_regex": (None, []),
    "no_stop_trim": (None, False),
    "custom_logit_processor": (None,),
    "lora_path": (None,),
    "input_ids": (None,),
    "prompt_embeds": (None,),
    # SGLang's clients send them at its defaults, by which thoughts are told apart, and as they come.
    "separate_reasoning": (None, True),
    "stream_reasoning": (None, True),
}

#: The same by the names of this server, at the endpoints that have them.
_CALLED_HERE = {
    "grammar": "guided_grammar",
    "no_stop_trim": "include_stop_str_in_output",
    "functions": "tools",
    "function_call": "tool_choice",
}


class SloFields(RequestModel):
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


class SpeculationFields(RequestModel):
    """What speculation may do for the request."""

    mode: Literal["auto", "off"] | None = Field(None, description="`off` decodes without drafts.")
    drafters: list[Annotated[str, Field(max_length=128)]] | None = Field(
        None, max_length=64, description="Drafters it may use; all if unset."
    )
    max_tokens: int | None = Field(None, ge=0, le=1024, description="Most draft tokens verified per step.")
    trace: bool | None = Field(
        None, description="Every chunk of a stream tells the token tree of its step in `flotilla`."
    )


class StreamOptions(RequestModel):
    """OpenAI's and vLLM's options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Accepted and not used.")
    continuous_usage_stats: bool | None = Field(None, description="Token counts so far in every chunk.")


class CommonFields(RequestModel):
    """Fields of every request for text; null is the same as leaving a field out."""

    model: str | None = Field(None, description="Id of the target or of an adapter; the target if unset.")
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: RepetitionPenalty = None
    logit_bias: LogitBias = Field(default_factory=dict)
    seed: int | None = Field(None, ge=-MAX_INT64 - 1, le=MAX_INT64)
    allowed_token_ids: list[TokenId] | None = Field(
        None, min_length=1, max_length=1 << 17, description="No other token is possible."
    )
    bad_words: BadWords = Field((), description="Texts that must not come about.")
    stop: StopStrings = ()
    stop_token_ids: list[TokenId] | None = Field(None, max_length=64)
    min_tokens: int | None = Field(None, ge=0, le=1 << 24)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=1 << 24, description="Keep only so many tokens; -1 keeps what fits."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where tokens are then cut away; at the left if unset."
    )
    stream: bool | None = None
    slo: SloFields | None = None
    speculation: SpeculationFields | None = None
    priority: int | None = Field(None, ge=-(1 << 31), lt=1 << 31, description="Lower is earlier.")
    service_tier: str | None = Field(None, max_length=MOST_NAME_CHARACTERS)
    request_id: RequestId | None = None
    user: str | None = Field(None, description="Accepted and not used.")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Keys and values of prompts are shared only among requests of the same salt.",
    )
    metadata: dict[str, str] | None = Field(None, description="Accepted and not used.")
    safety_identifier: str | None = Field(None, description="Accepted and not used.")
    session_id: str | None = Field(None, description="Accepted and not used.")
    prompt_cache_key: str | None = Field(
        None, description="Accepted and not used: prefixes are shared anyway."
    )
    # Hints for speed, which change no answer.
    prompt_cache_retention: str | None = Field(None, description="Accepted and not used.")
    prompt_cache_options: dict[str, Any] | None = Field(None, description="Accepted and not used.")
    prediction: dict[str, Any] | None = Field(
        None, description="Accepted and not used: drafters guess by themselves."
    )
    store: bool | None = Field(None, description="Accepted and not used: nothing is stored.")


class GenerationRequest(CommonFields, StructuredFields):
    """Fields that completions and chat share besides."""

    max_tokens: int | None = Field(None, ge=1, le=1 << 24)
    n: int | None = Field(None, ge=1, le=8)
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Log-probabilities of the prompt, with so many alternatives."
    )
    return_token_ids: bool | None = Field(None, description="Also return `token_ids` and the prompt's.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description='Tokens in log-probabilities are "token_id:17" instead of text.'
    )
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_trace(self) -> bool:
        """Whether the token tree of every step is to be told."""
        return bool(self.speculation and self.speculation.trace)

    @property
    def counts_tokens(self) -> bool:
        """Whether every chunk of the stream tells the token counts so far."""
        return self.includes_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0, le=1 << 24, description="0 with `echo` reads the prompt only.")
    best_of: int | None = Field(None, ge=1, le=8, description="Generate so many, return the `n` likeliest.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None


class ChatRequest(GenerationRequest):
    """Body of `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 24)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(None, description="The answer goes on with the last message.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")
    documents: list[dict[str, Any]] | None = Field(
        None, max_length=1024, description="What the template shows the model to answer from."
    )
    echo: bool | None = Field(
        None, description="The answer begins with the last message, where that is the assistant's."
    )
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    verbosity: str | None = Field(None, description="Accepted and not used.")
    reasoning_effort: str | None = Field(
        None,
        max_length=64,
        description="A variable of the chat template, as is `enable_thinking`, which is false for `none` and "
        "else true; `chat_template_kwargs` wins.",
    )
    include_reasoning: bool | None = Field(
        None, description="Whether what the model thinks is told, where that is known (`reasoning_content`)."
    )


def template_variables(effort: str | None, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Variables of the chat template: `given` ones, and how to reason under the names of vLLM's."""
    said = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return said | dict(given or {})


RequestType = TypeVar("RequestType", bound=BaseModel)


def json_object(
    text: bytes | str, what: str = "The request body", param: str | None = None
) -> dict[str, Any]:
    """The JSON object that a text holds; raises `ApiError` (400) if it is anything else.

    Args:
        text: JSON, of numbers that are finite.
        what: the text, in messages.
        param: the field that holds the text, if one does.
    """
    if isinstance(text, bytes):
        text = text.removeprefix(BOM_UTF8)  # as other servers do: tools of Windows write it
    try:
        data = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        reason = str(error)
        for told in _HALF_OF_A_PAIR:
            # Written by whoever cuts a text by JavaScript's length: the place alone says nothing to them.
            reason = reason.replace(told, "half of a surrogate pair, as of an emoji that was cut in two,")
        raise bad_request(f"{what} is not valid JSON: {reason}.", param, "invalid_json") from None
    if not isinstance(data, dict):
        raise bad_request(f"{what} must be a JSON object.", param, "invalid_json")
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    if _MAY_BE_BEYOND.search(text):
        _check_finite(data)
    return data


#: How the parser tells `"\ud83d"` without its other half.
_HALF_OF_A_PAIR = ("unexpected end of hex escape", "lone leading surrogate in hex escape")

# What a number must have to be above 1e308: other bodies, of which the parts may be millions, are not walked.
_MAY_BE_BEYOND = re.compile(r"[eE]\+?\d\d|\d{250}")


#: Of what a parser makes of JSON: by type, since a prompt may be many thousand integers.
_MAY_BE_INFINITE = frozenset({float, dict, list})


def _check_finite(data: dict[str, Any]) -> None:
    """Refuse numbers such as 1e999, which are infinite once read; what takes any JSON would pass them on."""
    # Values and where they are, as (place of what holds it, key): paths are long, and only one is ever shown.
    rest: list[tuple[Any, Any]] = [((), data)]
    while rest:
        place, value = rest.pop()
        if isinstance(value, dict | list):
            within = value.items() if isinstance(value, dict) else enumerate(value)
            # Most lists are of tokens or texts, which are not copied.
            rest += [((place, key), one) for key, one in within if type(one) in _MAY_BE_INFINITE]
        elif not math.isfinite(value):
            keys: list[int | str] = []
            while place:
                place, key = place
                keys.append(key)
            path = field_path(tuple(reversed(keys)))
            raise bad_request(f"`{path}` must be a finite number.", path)


def validated(data: dict[str, Any], request_type: type[RequestType]) -> RequestType:
    """The request in JSON data, which is left without neutral fields; raises `ApiError` (400)."""
    for name in (data.keys() & NEUTRAL_VALUES.keys()) - request_type.model_fields.keys():
        value = data.pop(name)
        # `1 == True` in Python: compare types as well, so that `best_of: true` is refused.
        if not any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL_VALUES[name]):
            called = _CALLED_HERE.get(name)
            instead = f"send `{called}`" if called in request_type.model_fields else "leave it out"
            raise ApiError(
                400,
                f"`{name}` is not supported here; {instead}.",
                param=name,
                code="unsupported_parameter",
            )
    try:
        request = request_type.model_validate(data)
    except ValidationError as error:
        raise from_validation(error, request_type) from None
    if isinstance(request, GenerationRequest):
        check_combination(request)
    return request


def check_combination(request: GenerationRequest) -> None:
    """Refuse fields that contradict each other."""
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("`prompt_logprobs` cannot be had in a stream.", "prompt_logprobs")
    if request.truncate_prompt_tokens == 0:
        raise bad_request("`truncate_prompt_tokens` must be -1, or 1 or more.", "truncate_prompt_tokens")
    if request.stream_options is not None and not request.stream:
        raise bad_request("`stream_options` needs `stream` to be true.", "stream_options")
    if request.wants_trace and not request.stream:
        raise bad_request("`speculation.trace` needs `stream` to be true.", "speculation.trace")
    if isinstance(request, ChatRequest):
        # vLLM's clients send 0 as the default, which asks for nothing.
        if request.top_logprobs and not request.logprobs:
            raise bad_request("`top_logprobs` needs `logprobs` to be true.", "top_logprobs")
        limits = {request.max_tokens, request.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise bad_request("Give `max_completion_tokens` or `max_tokens`, not both.", "max_tokens")
        check_messages(request.messages)
        if request.continue_final_message and request.add_generation_prompt:
            raise bad_request(
                "`continue_final_message` goes on with the last message and `add_generation_prompt` opens "
                "a new one; ask for one of them.",
                "continue_final_message",
            )
    elif isinstance(request, CompletionRequest):
        if request.max_tokens == 0 and not request.echo:
            raise bad_request("`max_tokens` may be 0 only with `echo`.", "max_tokens")
        if request.best_of is not None:
            if request.best_of < (request.n or 1):
                raise bad_request(f"`best_of` is {request.best_of}, below `n`, {request.n or 1}.", "best_of")
            if request.stream and request.best_of > (request.n or 1):
                raise bad_request("`best_of` above `n` cannot be streamed.", "best_of")
