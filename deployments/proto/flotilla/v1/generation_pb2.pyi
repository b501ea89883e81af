from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("model", "prompt", "prompt_token_ids", "messages", "add_generation_prompt", "add_special_tokens", "echo", "max_tokens", "min_tokens", "n", "best_of", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed", "logprobs", "return_token_ids", "prompt_logprobs", "skip_special_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "slo", "service_tier", "priority", "speculation", "request_id", "extra_body_json", "proxy_call_id")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    SERVICE_TIER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EXTRA_BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    PROXY_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    add_generation_prompt: bool
    add_special_tokens: bool
    echo: bool
    max_tokens: int
    min_tokens: int
    n: int
    best_of: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    logprobs: int
    return_token_ids: bool
    prompt_logprobs: int
    skip_special_tokens: bool
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    slo: Slo
    service_tier: str
    priority: int
    speculation: Speculation
    request_id: str
    extra_body_json: str
    proxy_call_id: str
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., add_generation_prompt: _Optional[bool] = ..., add_special_tokens: _Optional[bool] = ..., echo: _Optional[bool] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., n: _Optional[int] = ..., best_of: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., logprobs: _Optional[int] = ..., return_token_ids: _Optional[bool] = ..., prompt_logprobs: _Optional[int] = ..., skip_special_tokens: _Optional[bool] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., include_stop_str_in_output: _Optional[bool] = ..., ignore_eos: _Optional[bool] = ..., slo: _Optional[_Union[Slo, _Mapping]] = ..., service_tier: _Optional[str] = ..., priority: _Optional[int] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., request_id: _Optional[str] = ..., extra_body_json: _Optional[str] = ..., proxy_call_id: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class Slo(_message.Message):
    __slots__ = ("tpot_ms", "ttft_ms", "e2e_ms", "tpot_multiple", "ttft_multiple", "e2e_multiple", "on_miss")
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    E2E_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    TTFT_MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    E2E_MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    ON_MISS_FIELD_NUMBER: _ClassVar[int]
    tpot_ms: float
    ttft_ms: float
    e2e_ms: float
    tpot_multiple: str
    ttft_multiple: str
    e2e_multiple: str
    on_miss: str
    def __init__(self, tpot_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., e2e_ms: _Optional[float] = ..., tpot_multiple: _Optional[str] = ..., ttft_multiple: _Optional[str] = ..., e2e_multiple: _Optional[str] = ..., on_miss: _Optional[str] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("mode", "drafters", "max_tokens")
    MODE_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    mode: str
    drafters: _containers.RepeatedScalarFieldContainer[str]
    max_tokens: int
    def __init__(self, mode: _Optional[str] = ..., drafters: _Optional[_Iterable[str]] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("id", "request_id", "model", "created", "choices", "usage", "metrics")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    id: str
    request_id: str
    model: str
    created: int
    choices: _containers.RepeatedCompositeFieldContainer[Choice]
    usage: Usage
    metrics: Metrics
    def __init__(self, id: _Optional[str] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., created: _Optional[int] = ..., choices: _Optional[_Iterable[_Union[Choice, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., metrics: _Optional[_Union[Metrics, _Mapping]] = ...) -> None: ...

class GenerateChunk(_message.Message):
    __slots__ = ("id", "request_id", "model", "created", "choice", "usage", "metrics", "event_id")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    request_id: str
    model: str
    created: int
    choice: Choice
    usage: Usage
    metrics: Metrics
    event_id: int
    def __init__(self, id: _Optional[str] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., created: _Optional[int] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., metrics: _Optional[_Union[Metrics, _Mapping]] = ..., event_id: _Optional[int] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("index", "text", "token_ids", "prompt_token_ids", "logprobs", "finish_reason", "stop_string", "stop_token_id", "prompt_logprobs", "tool_calls", "reasoning")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: str
    stop_string: str
    stop_token_id: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    reasoning: str
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., reasoning: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "token", "bytes", "logprob", "top_logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    token: str
    bytes: bytes
    logprob: float
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, token_id: _Optional[int] = ..., token: _Optional[str] = ..., bytes: _Optional[bytes] = ..., logprob: _Optional[float] = ..., top_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "token", "bytes", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    token: str
    bytes: bytes
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., token: _Optional[str] = ..., bytes: _Optional[bytes] = ..., logprob: _Optional[float] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details", "completion_tokens_details")
    class PromptTokensDetails(_message.Message):
        __slots__ = ("cached_tokens",)
        CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        cached_tokens: int
        def __init__(self, cached_tokens: _Optional[int] = ...) -> None: ...
    class CompletionTokensDetails(_message.Message):
        __slots__ = ("reasoning_tokens",)
        REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
        reasoning_tokens: int
        def __init__(self, reasoning_tokens: _Optional[int] = ...) -> None: ...
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_DETAILS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_DETAILS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Usage.PromptTokensDetails
    completion_tokens_details: Usage.CompletionTokensDetails
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., total_tokens: _Optional[int] = ..., prompt_tokens_details: _Optional[_Union[Usage.PromptTokensDetails, _Mapping]] = ..., completion_tokens_details: _Optional[_Union[Usage.CompletionTokensDetails, _Mapping]] = ...) -> None: ...

class Metrics(_message.Message):
    __slots__ = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tpot_ms", "e2e_ms", "tokens_per_second", "slo", "speculative_decoding", "drafters", "num_preemptions", "seed", "predicted", "tier")
    class Attainment(_message.Message):
        __slots__ = ("tpot_ms", "ttft_ms", "e2e_ms", "met", "tpot_met", "ttft_met", "e2e_met")
        TPOT_MS_FIELD_NUMBER: _ClassVar[int]
        TTFT_MS_FIELD_NUMBER: _ClassVar[int]
        E2E_MS_FIELD_NUMBER: _ClassVar[int]
        MET_FIELD_NUMBER: _ClassVar[int]
        TPOT_MET_FIELD_NUMBER: _ClassVar[int]
        TTFT_MET_FIELD_NUMBER: _ClassVar[int]
        E2E_MET_FIELD_NUMBER: _ClassVar[int]
        tpot_ms: float
        ttft_ms: float
        e2e_ms: float
        met: bool
        tpot_met: bool
        ttft_met: bool
        e2e_met: bool
        def __init__(self, tpot_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., e2e_ms: _Optional[float] = ..., met: _Optional[bool] = ..., tpot_met: _Optional[bool] = ..., ttft_met: _Optional[bool] = ..., e2e_met: _Optional[bool] = ...) -> None: ...
    class Prediction(_message.Message):
        __slots__ = ("ttft_ms", "tpot_ms", "e2e_ms")
        TTFT_MS_FIELD_NUMBER: _ClassVar[int]
        TPOT_MS_FIELD_NUMBER: _ClassVar[int]
        E2E_MS_FIELD_NUMBER: _ClassVar[int]
        ttft_ms: float
        tpot_ms: float
        e2e_ms: float
        def __init__(self, ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., e2e_ms: _Optional[float] = ...) -> None: ...
    class Tier(_message.Message):
        __slots__ = ("asked", "served", "downgraded")
        ASKED_FIELD_NUMBER: _ClassVar[int]
        SERVED_FIELD_NUMBER: _ClassVar[int]
        DOWNGRADED_FIELD_NUMBER: _ClassVar[int]
        asked: str
        served: str
        downgraded: bool
        def __init__(self, asked: _Optional[str] = ..., served: _Optional[str] = ..., downgraded: _Optional[bool] = ...) -> None: ...
    class SpeculativeDecoding(_message.Message):
        __slots__ = ("mean_acceptance_length", "draft_acceptance_rate", "num_spec_steps", "num_draft_tokens", "num_verified_tokens", "num_accepted_draft_tokens", "acceptance_by_depth")
        MEAN_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
        DRAFT_ACCEPTANCE_RATE_FIELD_NUMBER: _ClassVar[int]
        NUM_SPEC_STEPS_FIELD_NUMBER: _ClassVar[int]
        NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        NUM_VERIFIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        ACCEPTANCE_BY_DEPTH_FIELD_NUMBER: _ClassVar[int]
        mean_acceptance_length: float
        draft_acceptance_rate: float
        num_spec_steps: int
        num_draft_tokens: int
        num_verified_tokens: int
        num_accepted_draft_tokens: int
        acceptance_by_depth: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, mean_acceptance_length: _Optional[float] = ..., draft_acceptance_rate: _Optional[float] = ..., num_spec_steps: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_verified_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ..., acceptance_by_depth: _Optional[_Iterable[int]] = ...) -> None: ...
    class DraftersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TIME_TO_FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    MEAN_ITL_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    E2E_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_DECODING_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float
    tpot_ms: float
    e2e_ms: float
    tokens_per_second: float
    slo: Metrics.Attainment
    speculative_decoding: Metrics.SpeculativeDecoding
    drafters: _containers.ScalarMap[str, int]
    num_preemptions: int
    seed: int
    predicted: Metrics.Prediction
    tier: Metrics.Tier
    def __init__(self, time_to_first_token_ms: _Optional[float] = ..., generation_time_ms: _Optional[float] = ..., queue_time_ms: _Optional[float] = ..., mean_itl_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., e2e_ms: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., slo: _Optional[_Union[Metrics.Attainment, _Mapping]] = ..., speculative_decoding: _Optional[_Union[Metrics.SpeculativeDecoding, _Mapping]] = ..., drafters: _Optional[_Mapping[str, int]] = ..., num_preemptions: _Optional[int] = ..., seed: _Optional[int] = ..., predicted: _Optional[_Union[Metrics.Prediction, _Mapping]] = ..., tier: _Optional[_Union[Metrics.Tier, _Mapping]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("num_cancelled",)
    NUM_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    num_cancelled: int
    def __init__(self, num_cancelled: _Optional[int] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("id", "max_model_len", "vocab_size", "drafters", "policy", "parent")
    ID_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    id: str
    max_model_len: int
    vocab_size: int
    drafters: _containers.RepeatedScalarFieldContainer[str]
    policy: str
    parent: str
    def __init__(self, id: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., drafters: _Optional[_Iterable[str]] = ..., policy: _Optional[str] = ..., parent: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("version", "model", "ready")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: Model
    ready: bool
    def __init__(self, version: _Optional[str] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., ready: _Optional[bool] = ...) -> None: ...
