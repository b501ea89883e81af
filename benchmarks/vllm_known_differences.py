"""In what answers differ from vLLM's on purpose, or because vLLM's are wrong."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from benchmarks.answer_differences import Difference, Kind


@dataclass(frozen=True, slots=True)
class Known:
    """One reason, and the differences that it explains.

    Attributes:
        reason: what is so here, and what there.
        requests: names of the requests, as patterns of shells.
        places: in the answer, likewise; brackets stand for themselves.
        kinds: of differences; all if empty.
    """

    reason: str
    requests: tuple[str, ...]
    places: tuple[str, ...]
    kinds: tuple[Kind, ...] = ()

    def explains(self, request: str, difference: Difference) -> bool:
        """Whether this is why."""
        return (
            (not self.kinds or difference.kind in self.kinds)
            and any(fnmatchcase(request, pattern) for pattern in self.requests)
            and any(fnmatchcase(difference.where, _literal(pattern)) for pattern in self.places)
        )


def _literal(pattern: str) -> str:
    return pattern.replace("[]", "[[]]")


def explained(request: str, difference: Difference) -> str | None:
    """The reason for a difference; None if there is none."""
    return next((known.reason for known in KNOWN if known.explains(request, difference)), None)


_ANY = ("*",)
_STATUS: tuple[Kind, ...] = ("status",)

KNOWN = (
    Known(
        "answers carry the receipt, `metrics`, and every chunk `system_fingerprint`, as OpenAI's do",
        _ANY,
        ("metrics", "*.metrics", "*.system_fingerprint"),
        ("added",),
    ),
    Known(
        "errors have OpenAI's `type`, `param` and `code`; vLLM's types are its own, and its codes the status",
        _ANY,
        ("error.type", "error.param", "error.code", "error", "detail", "type", "request_id"),
    ),
    Known(
        "a field that does not exist is refused, unless `http.unknown_fields` is `ignore`",
        ("*: unknown field",),
        ("",),
        _STATUS,
    ),
    Known(
        "values outside OpenAI's ranges and types are refused: a bias of 200, digits as text, a user without "
        "`content`, two bounds that differ",
        (
            "completion: max_tokens as digits",
            "completion: logit_bias 200",
            "chat: user without content",
            "chat: max_completion_tokens",
            "chat: both bounds",
        ),
        ("",),
        _STATUS,
    ),
    Known(
        "`top_p` 0 takes the most probable token, as OpenAI's does; vLLM refuses it",
        ("completion: top_p 0",),
        ("",),
        _STATUS,
    ),
    Known(
        "an empty prompt and an empty list of tools are served, as OpenAI does",
        ("completion: empty prompt", "chat: no tools"),
        ("",),
        _STATUS,
    ),
    Known(
        "`max_tokens: 0` generates nothing, in vLLM one token",
        ("completion: echo and *",),
        ("usage.*",),
    ),
    Known(
        "log-probabilities of an echoed prompt are told in OpenAI's form; in vLLM as `prompt_logprobs` too",
        ("completion: echo *", "chat: echo*"),
        ("*prompt_logprobs",),
        ("missing",),
    ),
    Known(
        "`text_offset` is a place in `text`; vLLM counts special tokens that are not shown, and ids as text",
        ("completion: *",),
        ("choices[].logprobs.text_offset[]",),
    ),
    Known(
        "half a character is shown as U+FFFD at the end of an answer, in vLLM not at all",
        ("completion: two sampled choices",),
        ("choices[].text",),
    ),
    Known(
        "`best_of` is served and all its tokens are counted; vLLM passes over it",
        ("completion: best_of",),
        ("usage.*",),
    ),
    Known(
        "JSON comes on one line with at most one space after a comma or colon; vLLM lets models write any",
        ("*json*", "*schema*"),
        ("choices[].text", "choices[].message.content", "output[].content[].text"),
    ),
    Known(
        "ids of the prompt are told when they are asked for; vLLM tells them in every echoed stream",
        ("completion: stream with echo",),
        ("choices[].prompt_token_ids",),
    ),
    Known(
        "the answer is the assistant's, also where the template opens no turn",
        ("chat: add_generation_prompt off",),
        ("choices[].message.role",),
    ),
    Known(
        "tools are shown to a model whose template has no place for them, which vLLM leaves out; arguments "
        "follow the tool's schema, where vLLM's hermes parser gave a string",
        ("*: tools, one *", "*: a named tool*", "chat: a tool that may be called"),
        ("*",),
    ),
    Known(
        "results of tools are told as text where the template knows no role for them; vLLM refuses them",
        ("chat: a call and its result", "chat: arguments that are no JSON"),
        ("",),
        _STATUS,
    ),
    Known(
        "documents are refused where the template would leave them out; vLLM leaves them out",
        ("chat: documents",),
        ("",),
        _STATUS,
    ),
    Known(
        "cached tokens are told everywhere, and are counted one by one; vLLM's are of blocks of 16, and what "
        "is written into the cache is its own field",
        _ANY,
        ("*created_cache_tokens", "*cache_creation_input_tokens", "*cache_read_input_tokens"),
    ),
    Known(
        "cached tokens are no `input_tokens` of a message, as Anthropic has it",
        ("message: *",),
        ("*usage.input_tokens",),
    ),
    Known(
        "vLLM 0.32 puts another beginning of the text in front of a response's conversation, not a chat's: "
        "the prompt is one token longer, and the answer another",
        ("response: *",),
        (
            "usage.input_tokens", "usage.output_tokens", "usage.total_tokens", "output[].content[]*",
            "*.usage.input_tokens", "*.usage.output_tokens", "*.usage.total_tokens",
            "fields.response.output_text.*", "fields.response.content_part.done.part.text",
            "fields.response.output_item.done.item.content[].text",
        ),
        ("value",),
    ),
    Known(
        "a response that ends at its bound is `incomplete`, and so is its last item",
        ("response: *",),
        (
            "output[].status", "order[]", "fields.response.completed", "fields.response.incomplete",
            "fields.response.output_item.done.item.status",
        ),
    ),
    Known(
        "responses have OpenAI's fields `metadata`, `reasoning`, `text`, `store` and lists of `logprobs` "
        "throughout, and vLLM's own ones not",
        ("response: *",),
        (
            "*metadata", "*reasoning", "*text", "*store", "*logprobs", "*penalty", "*_per_turn",
            "*tool_output_tokens",
        ),
        ("added", "missing"),
    ),
    Known(
        "`tool_choice` without tools is `auto`, and the service tier is the one that served",
        ("response: *",),
        ("*tool_choice", "*service_tier"),
    ),
    Known(
        "no responses are stored: an earlier one is refused as a field, not as unknown",
        ("response: an earlier response",),
        ("",),
        _STATUS,
    ),
    Known(
        "models are told with what Anthropic's client reads, drafters and policy; one model by its name",
        ("models", "one model"),
        ("data[].*", "has_more", "first_id", "last_id", ""),
    ),
    Known(
        "`/health` says so in JSON, and `/version` its own version",
        ("health", "ping", "ping by POST", "version"),
        ("", "version"),
        ("type", "value"),
    ),
    Known(
        "ids beyond the vocabulary are refused, where vLLM shows nothing",
        ("detokenize beyond",),
        ("",),
        _STATUS,
    ),
    Known(
        "a body that is not said to be JSON is refused with 415, in vLLM with 400",
        ("body of *",),
        ("",),
        _STATUS,
    ),
    Known(
        "`count_tokens` does not tell of managed contexts, which are not there",
        ("count_tokens",),
        ("context_management",),
    ),
    Known(
        "`/ping`, `/load` and the renderer are vLLM's own",
        ("ping", "ping by POST", "load", "render *"),  # `/ping` until it was answered here
        ("",),
        _STATUS,
    ),
)  # fmt: skip
