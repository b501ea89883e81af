"""Values of requests: their bounds, and for those of several forms one message instead of one per form."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from cluster.tier_config import MOST_MS, check_target
from deployments.call_ids import REQUEST_ID, is_request_id

#: Most stop strings, most characters of one, most prompts in one request, most alternatives per token.
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_PROMPTS = 64
MAX_LOGPROBS = 20
#: Most bad words.
MAX_BAD_WORDS = 64

#: JSON numbers beyond this cannot be carried to the cell.
MAX_INT64 = (1 << 63) - 1


def _fail(kind: str, message: str) -> PydanticCustomError:
    # `kind` is ours, and `message` may hold braces that pydantic would take for its own placeholders.
    return PydanticCustomError(kind, "{text}", {"text": message})


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def stop_strings(value: Any) -> Any:
    """A string or a list of them as a tuple."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _fail("stop_type", "must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise _fail("stop_value", f"must hold at most {MAX_STOPS} strings, not {len(stops)}")
    if any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise _fail("stop_value", f"every string must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def bad_words(value: Any) -> Any:
    """A list of strings as a tuple."""
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise _fail("bad_words_type", "must be a list of strings")
    if len(value) > MAX_BAD_WORDS:
        raise _fail("bad_words_value", f"must hold at most {MAX_BAD_WORDS} strings, not {len(value)}")
    if any(not word.strip() or len(word) > MAX_STOP_CHARS for word in value):
        raise _fail(
            "bad_words_value", f"every string must have 1 to {MAX_STOP_CHARS} characters, not only spaces"
        )
    return tuple(value)


def logit_bias(value: Any) -> Any:
    """JSON's string keys as token ids; the vocabulary's size is checked where it is known."""
    if not isinstance(value, dict):
        raise _fail("logit_bias_type", "must be an object from token ids to biases")
    if len(value) > 1024:
        raise _fail("logit_bias_value", f"must hold at most 1024 token ids, not {len(value)}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10):
            raise _fail("logit_bias_value", f'keys must be token ids such as "17", not {str(key)[:40]!r}')
        if not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
            raise _fail("logit_bias_value", f"the bias of token {key} must be a number from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


def prompts(value: Any) -> Any:
    """A string, token ids, or a list of either, as a list of prompts (each a string or token ids)."""
    form = "must be a string, a list of token ids, or a list of either"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _fail("prompt_type", form)
    if not value:
        raise _fail("prompt_value", "must not be empty")
    if all(_is_int(item) for item in value):
        return [_token_ids(value)]
    if len(value) > MAX_PROMPTS:
        raise _fail("prompt_value", f"must hold at most {MAX_PROMPTS} prompts, not {len(value)}")
    found: list[str | list[int]] = []
    for item in value:
        if isinstance(item, list) and item and all(_is_int(token) for token in item):
            found.append(_token_ids(item))
        elif isinstance(item, str):
            found.append(item)
        else:
            raise _fail("prompt_type", form)
    return found


def _token_ids(ids: list[int]) -> list[int]:
    if any(not 0 <= token < 1 << 31 for token in ids):
        raise _fail("prompt_value", "token ids must not be negative or above the vocabulary")
    return ids


#: Where the text of a part stands, by its type.
_TEXT_OF = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def message_text(value: Any) -> Any:
    """A message's text: a string, or OpenAI's list of text parts, each a line of its own as with vLLM."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _fail("content_type", "must be a string or a list of text parts")
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        # A part of an answer that is sent back: the text of a refusal is what the model said.
        text = part.get(_TEXT_OF.get(kind, "")) if isinstance(kind, str) else None
        if not isinstance(text, str):
            raise _fail(
                "content_value",
                f'part {number} must be {{"type": "text", "text": ...}}; this model reads text only',
            )
        texts.append(text)
    return "\n".join(texts)


def latency_target(value: Any) -> Any:
    """Milliseconds, or a multiple of the baseline as a string."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _fail("latency_type", 'must be a number of milliseconds, or a multiple such as "1.2x"')
    try:
        return check_target(value)
    except ValueError as error:
        raise _fail("latency_value", str(error)) from None


def request_id(value: str) -> str:
    """An id that can stand in logs and headers as it is."""
    if not is_request_id(value):
        raise _fail("request_id_value", "must be 1 to 128 letters, digits or any of . _ : ~ -")
    return value


# pydantic would describe only what these validators return, and clients are generated from /openapi.json.
# Null never reaches them (`RequestModel`).
_NULL = {"type": "null"}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_TOKENS = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1},
}
_PROMPTS = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_PROMPTS,
    "items": {"anyOf": [{"type": "string"}, _TOKENS]},
}
_PART = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["text", "input_text", "output_text"]},
                "text": {"type": "string"},
            },
            "required": ["type", "text"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "refusal"}, "refusal": {"type": "string"}},
            "required": ["type", "refusal"],
        },
    ]
}
_BIASES = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": 1024,
}
_MULTIPLE = {"type": "string", "pattern": r"^\s*(\d{1,6}(\.\d{1,6})?|\.\d{1,6})x\s*$", "examples": ["1.2x"]}


def _any_of(*forms: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": list(forms)})


StopStrings = Annotated[
    tuple[str, ...],
    BeforeValidator(stop_strings),
    _any_of(_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}, _NULL),
]
BadWords = Annotated[
    tuple[str, ...],
    BeforeValidator(bad_words),
    _any_of({"type": "array", "items": _STOP | {"pattern": r"\S"}, "maxItems": MAX_BAD_WORDS}, _NULL),
]
LogitBias = Annotated[dict[int, float], BeforeValidator(logit_bias), _any_of(_BIASES, _NULL)]
Prompts = Annotated[
    list[str | list[int]], BeforeValidator(prompts), _any_of({"type": "string"}, _TOKENS, _PROMPTS)
]
MessageText = Annotated[
    str,
    BeforeValidator(message_text),
    _any_of({"type": "string"}, {"type": "array", "items": _PART}, _NULL),
]
LatencyTarget = Annotated[
    float | str,
    BeforeValidator(latency_target),
    _any_of({"type": "number", "exclusiveMinimum": 0, "maximum": MOST_MS}, _MULTIPLE),
]
RequestId = Annotated[
    str, AfterValidator(request_id), WithJsonSchema({"type": "string", "pattern": f"^{REQUEST_ID}$"})
]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]

#: How tokens are chosen; None where nothing is said of it.
Temperature = Annotated[float | None, Field(ge=0, le=2)]
TopP = Annotated[float | None, Field(ge=0, le=1, description="0 takes the most probable token.")]
TopK = Annotated[int | None, Field(ge=-1, le=1 << 24, description="0 and -1 keep all tokens.")]
MinP = Annotated[float | None, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float | None, Field(gt=0, le=100)]
