"""From the fields of an API request to what a cell is asked for."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from cluster.baseline import Baseline
from cluster.stream_messages import Speculation
from cluster.tier_config import TierConfig
from deployments.errors import WindowExceeded, bad_request, model_not_found
from deployments.objectives import Asked, Contract, ObjectiveError, asked_by_fields, first_of
from deployments.objectives import contract as resolve_contract
from deployments.openai_schema import ChatRequest, CompletionRequest, GenerationRequest
from engine.constraint import Constraint
from engine.sampling_params import SamplingParams

#: OpenAI's default for completions.
COMPLETION_MAX_TOKENS = 16
#: What is reckoned with at most for a chat whose client named no bound. It may go on to the end of the
#: window, but few do, and a key would have to hold as many tokens for each of them.
ASSUMED_MAX_TOKENS = 4096

_LEAST_INT64 = 1 << 63  # without its sign


@dataclass(frozen=True)
class CellInfo:
    """What a cell says about itself (`Cell.describe`), as far as requests are checked against it.

    Attributes:
        model: the served model's id.
        max_tokens: the window: most tokens of prompt and output together.
        vocab_size: token ids are below it.
        default_max_tokens: most output tokens of a chat whose client named no bound; None for all that the
            window leaves.
        drafters: names a request may choose from.
        ready: whether it serves.
        is_loaded: whether it has served: then requests may wait for it to do so again.
        policy: the speculation policy that runs.
        baseline: what it takes for one request by itself; None where it does not say.
        path: where the model lies; empty where it does not say.
        fingerprint: what its texts depend on (`cluster.served_target.system_fingerprint`).
        adapters: where LoRA adapters lie, by the ids under which they are served besides `model`.
        serves_target: whether requests may ask the target itself, without an adapter.
        max_requests: how many can be running and waiting at once in all cells that there may be; None where
            it does not say.
    """

    model: str
    max_tokens: int
    vocab_size: int
    default_max_tokens: int | None = None
    drafters: tuple[str, ...] = ()
    ready: bool = True
    policy: str = ""
    baseline: Baseline | None = None
    is_loaded: bool = True
    path: str = ""
    fingerprint: str | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    serves_target: bool = True
    max_requests: int | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """All ids that a request may name, that of the target first."""
        return (self.model, *self.adapters) if self.serves_target else tuple(self.adapters)

    def with_models(self, names: Collection[str]) -> CellInfo:
        """The same for who may ask these only."""
        adapters = {name: path for name, path in self.adapters.items() if name in names}
        return replace(self, adapters=adapters, serves_target=self.model in names)

    def adapter_of(self, model: str | None) -> str:
        """The adapter that a request for a model is answered with, empty for none; raises 404 without one.

        An empty name is none, as to vLLM: clients send it where nothing is set.
        """
        model = model or None
        if self.serves_target and (model is None or model == self.model):
            return ""
        if model is None or model not in self.adapters:
            raise model_not_found(model, self.models, needs_one=not self.serves_target)
        return model

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> CellInfo:
        """Read the dictionary of `Cell.describe`."""
        ready = bool(description.get("ready", True))
        return cls(
            model=str(description["model"]),
            max_tokens=int(description["max_tokens"]),
            vocab_size=int(description["vocab_size"]),
            default_max_tokens=description.get("default_max_tokens"),
            # Those configured, where it tells: one that is being restarted may still be asked for.
            drafters=tuple(description.get("drafters_configured") or description.get("drafters", ())),
            ready=ready,
            policy=str(description.get("policy", "")),
            baseline=msgspec.convert(description["baseline"], Baseline)
            if "baseline" in description
            else None,
            is_loaded=bool(description["stage"] == "ready" if "stage" in description else ready),
            path=str(description.get("path", "")),
            fingerprint=description.get("fingerprint"),
            adapters=dict(description.get("adapters", {})),
            max_requests=description.get("max_requests"),
        )


def choose_seed(request: GenerationRequest) -> int:
    """The request's seed, or a random one; small enough that JavaScript can send it back unchanged."""
    return secrets.randbits(53) if request.seed is None else request.seed


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a request's choices, those of all prompts counted; the first has the request's own, so that
    it is what `n = 1` would give. Beyond 64 bits it goes on with the lowest."""
    return (seed + choice + _LEAST_INT64) % (2 * _LEAST_INT64) - _LEAST_INT64


def max_new_tokens(request: GenerationRequest, prompt_length: int, info: CellInfo, prompt_field: str) -> int:
    """How many tokens to generate at most; raises 400 with both lengths where they exceed the window."""
    rest = info.max_tokens - prompt_length
    if prompt_length == 0:
        raise bad_request(f"`{prompt_field}` has no tokens; send at least one.", prompt_field)
    if rest < 1:
        raise WindowExceeded(
            f"{_window(info)} However, `{prompt_field}` has {prompt_length} tokens, and the output must fit "
            "as well. Please reduce the length of the prompt.",
            prompt_field,
            num_prompt=prompt_length,
            num_asked=0,
            window=info.max_tokens,
        )
    field, asked = asked_max_tokens(request)
    if asked is None:
        return min(_default_max_tokens(request, info), rest)
    if asked > rest:
        raise WindowExceeded(
            f"{_window(info)} However, `{prompt_field}` has {prompt_length} tokens and `{field}` asks for "
            f"{asked} more. Ask for at most {rest}, or reduce the length of the prompt.",
            field,
            num_prompt=prompt_length,
            num_asked=asked,
            window=info.max_tokens,
        )
    return asked


def reckoned_tokens(request: GenerationRequest, max_tokens: int) -> int:
    """How much output is reckoned with of at most `max_tokens`: less where its client named no bound."""
    if asked_max_tokens(request)[1] is not None:
        return max_tokens
    return min(max_tokens, max(ASSUMED_MAX_TOKENS, request.min_tokens or 0))


def _window(info: CellInfo) -> str:
    """How messages about the context window begin: LiteLLM, CrewAI and OpenHands know them by OpenAI's words.

    They then try a model with a larger window, or shorten the conversation.
    """
    return f"This model's maximum context length is {info.max_tokens} tokens."


def asked_max_tokens(request: GenerationRequest) -> tuple[str, int | None]:
    """The field that says how many tokens to generate, and what it says."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    return "max_tokens", request.max_tokens


def reserved_tokens(request: GenerationRequest, info: CellInfo) -> int:
    """How many tokens of the window a prompt that is cut to fit leaves to its answer.

    Without a number asked for, those of an answer by default, but no more than a quarter of the window: in a
    small one a chat's answer may take it all, and nothing of the prompt would be left.
    """
    asked = asked_max_tokens(request)[1]
    if asked is not None:
        return max(1, asked)
    most = reckoned_tokens(request, _default_max_tokens(request, info))
    return max(1, request.min_tokens or 0, min(most, info.max_tokens // 4))


def sampling_params(
    request: GenerationRequest,
    *,
    seed: int,
    max_tokens: int,
    eos_ids: frozenset[int],
    info: CellInfo,
    bad_words: tuple[tuple[int, ...], ...] = (),
    constraint: Constraint | None = None,
) -> SamplingParams:
    """The sampling parameters of one choice.

    Args:
        request: what is asked.
        seed: of this choice.
        max_tokens: most to generate.
        eos_ids: tokens that end an answer, unless the request ignores them.
        info: what token ids there are.
        bad_words: the request's, as tokens.
        constraint: what the text must look like.

    Raises:
        ApiError: (400) for values that the model or each other rule out.
    """
    stop_ids = frozenset(request.stop_token_ids or ())
    allowed = tuple(request.allowed_token_ids or ())
    check_token_ids("logit_bias", request.logit_bias, info)
    check_token_ids("stop_token_ids", stop_ids, info)
    check_token_ids("allowed_token_ids", allowed, info)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(f"`min_tokens` is {min_tokens}, above the {max_tokens} to generate.", "min_tokens")
    if not request.ignore_eos:
        stop_ids |= eos_ids
    if allowed:
        barred = {word[-1] for word in bad_words} | (stop_ids if min_tokens else frozenset())
        if barred.issuperset(allowed):
            raise bad_request(
                "`allowed_token_ids` leaves nothing that `bad_words` and `min_tokens` do not rule out.",
                "allowed_token_ids",
            )
    max_tokens = max(1, max_tokens)  # the cell decides at least one, which `echo` alone does not show
    return SamplingParams(
        temperature=_default(request.temperature, 1.0),
        top_k=max(0, request.top_k or 0),
        top_p=_default(request.top_p, 1.0),
        min_p=_default(request.min_p, 0.0),
        presence_penalty=_default(request.presence_penalty, 0.0),
        frequency_penalty=_default(request.frequency_penalty, 0.0),
        repetition_penalty=_default(request.repetition_penalty, 1.0),
        logit_bias=request.logit_bias,
        allowed_token_ids=allowed,
        bad_words=bad_words,
        constraint=constraint,
        seed=seed,
        # The likeliest of several are told by the log-probabilities of their tokens.
        logprobs=0 if num_logprobs(request) is None and chooses_best(request) else num_logprobs(request),
        prompt_logprobs=num_prompt_logprobs(request),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=tuple(sorted(stop_ids)),
    )


def num_logprobs(request: GenerationRequest) -> int | None:
    """How many alternatives are returned per token; None for no log-probabilities."""
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    return request.logprobs if isinstance(request, CompletionRequest) else None


def echoes(request: GenerationRequest) -> bool:
    """Whether the answer begins with the prompt, as completions' may."""
    return isinstance(request, CompletionRequest) and bool(request.echo)


def num_prompt_logprobs(request: GenerationRequest) -> int | None:
    """How many alternatives are wanted per prompt token; None for no log-probabilities of the prompt."""
    asked = [request.prompt_logprobs]
    if echoes(request):
        asked.append(num_logprobs(request))
    return max((number for number in asked if number is not None), default=None)


def chooses_best(request: GenerationRequest) -> bool:
    """Whether more choices are generated than returned."""
    return isinstance(request, CompletionRequest) and (request.best_of or 1) > (request.n or 1)


def speculation(request: GenerationRequest, info: CellInfo) -> Speculation:
    """What speculation may do; raises 400 for a drafter the cell does not have."""
    asked = request.speculation
    if asked is None:
        return Speculation()
    for name in asked.drafters or ():
        if name not in info.drafters:
            there = ", ".join(info.drafters) or "none"
            raise bad_request(
                f"`speculation.drafters` names '{name}', but the drafters here are: {there}.",
                "speculation.drafters",
            )
    return Speculation(
        mode=asked.mode or "auto",
        drafters=tuple(asked.drafters or ()),
        max_tokens=asked.max_tokens,
        trace=bool(asked.trace),
    )


def contract(
    request: GenerationRequest,
    headers: Asked,
    tiers: Mapping[str, TierConfig],
    info: CellInfo,
    num_prompt: int,
    max_tokens: int,
) -> Contract:
    """On what terms the request is to be served; raises 400 with the field or header at fault."""
    slo = request.slo
    try:
        body = Asked() if slo is None else asked_by_fields(slo.targets, slo.on_miss)
        return resolve_contract(
            first_of(body, headers),
            request.service_tier,
            request.priority,
            tiers,
            info.baseline,
            num_prompt,
            max_tokens,
        )
    except ObjectiveError as error:
        raise bad_request(error.message, error.place) from None


def check_token_ids(field: str, ids: Any, info: CellInfo) -> None:
    """Refuse token ids the model does not have; `field` is where they stand."""
    largest = max(ids, default=0)
    if largest >= info.vocab_size:
        raise bad_request(
            f"`{field}` names token {largest}, but the vocabulary of '{info.model}' ends at "
            f"{info.vocab_size - 1}.",
            field,
        )


def _default_max_tokens(request: GenerationRequest, info: CellInfo) -> int:
    if isinstance(request, CompletionRequest):
        return COMPLETION_MAX_TOKENS
    return info.max_tokens if info.default_max_tokens is None else info.default_max_tokens


def _default(value: float | None, default: float) -> float:
    return default if value is None else value
