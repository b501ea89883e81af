"""Structured outputs: the fields that ask for them, and grammars compiled before the cell hears of them."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from deployments.errors import ApiError, bad_request
from deployments.request_model import RequestModel
from deployments.text_codec import TextCodec
from deployments.tools import ToolUse
from engine.constraint import Constraint, ConstraintKind
from engine.grammar import GrammarError, Grammars, make_tokenizer
from engine.grammar_source import MAX_TEXT
from engine.idle_keywords import without_idle
from engine.schema_parts import BY_NAME

#: Most alternatives of a choice.
MAX_CHOICES = 1024

Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=MAX_CHOICES)
]


def _schema(value: Any) -> Any:
    """A JSON schema, or the text of one, as text; one message for all forms."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise PydanticCustomError("schema_value", "{text}", {"text": f"is not JSON: {error}"}) from None
    if value is False:
        text = "is the schema that no answer keeps to"
        raise PydanticCustomError("schema_value", "{text}", {"text": text})
    if not isinstance(value, dict | bool):
        text = "must be a JSON schema: an object, or true for any JSON"
        raise PydanticCustomError("schema_type", "{text}", {"text": text})
    try:
        # llguidance knows "any JSON" only as the object without rules.
        return json.dumps({} if value is True else without_idle(value, formats=False), allow_nan=False)
    except ValueError:  # of a text: a body has no such numbers
        text = "must hold finite numbers only"
        raise PydanticCustomError("schema_value", "{text}", {"text": text}) from None


SchemaText = Annotated[
    str | None,
    BeforeValidator(_schema),
    WithJsonSchema(
        {
            "anyOf": [
                *({"type": kind} for kind in ("object", "string", "null")),
                {"type": "boolean", "const": True},
            ]
        }
    ),
]


class JsonSchemaFormat(RequestModel):
    """OpenAI's wrapping of a JSON schema."""

    name: str | None = Field(None, max_length=256, description="Accepted and not used.")
    description: str | None = Field(None, description="Accepted and not used.")
    schema_: SchemaText = Field(None, alias="schema", description="The JSON schema; any object if unset.")
    strict: bool | None = Field(None, description="Accepted; an answer always keeps to the schema.")


class ResponseFormat(RequestModel):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


#: Keywords of JSON schemas whose values are no schemas; those that say what other properties there may be.
_VALUES = frozenset({"const", "default", "enum", "examples"})
_SPEAK_OF_OTHERS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})


class StructuredOutputs(RequestModel):
    """vLLM's `structured_outputs`: one of them."""

    json_: SchemaText = Field(None, alias="json", description="A JSON schema, or the text of one.")
    regex: str | None = Field(None, min_length=1, description="Matches the whole answer.")
    choice: Choices | None = Field(None, description="One of these is the answer.")
    grammar: str | None = Field(None, min_length=1, description="A Lark or GBNF grammar.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    disable_any_whitespace: bool | None = Field(None, description="No whitespace between JSON's tokens.")
    disable_additional_properties: bool | None = Field(
        None, description="Objects of the schema have no other properties than it names, unless it says so."
    )
    disable_fallback: bool | None = Field(
        None, description="Accepted and not used: there is nothing to fall back to."
    )


class StructuredFields(RequestModel):
    """The fields of completions and chat that say what an answer must look like; one of them at most."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaText = Field(None, description="As `structured_outputs.json`.")
    guided_regex: str | None = Field(None, min_length=1, description="As `structured_outputs.regex`.")
    guided_choice: Choices | None = Field(None, description="As `structured_outputs.choice`.")
    guided_grammar: str | None = Field(None, min_length=1, description="As `structured_outputs.grammar`.")
    guided_decoding_backend: str | None = Field(
        None, description="Accepted and not used: there is one library for all of them."
    )
    # SGLang's names, which its clients in Outlines and Guidance send and cannot be told to replace.
    json_schema: SchemaText = Field(None, description="As `structured_outputs.json`.")
    regex: str | None = Field(None, min_length=1, description="As `structured_outputs.regex`.")
    ebnf: str | None = Field(None, min_length=1, description="As `structured_outputs.grammar`.")


def constraint_of(request: StructuredFields) -> tuple[Constraint, str] | None:
    """What the answer must look like, and the field that says so; None for any text.

    Raises:
        ApiError: (400) if fields say different things, or one says nothing.
    """
    found: dict[str, Constraint] = {}
    wanted = request.response_format
    if wanted is not None:
        if wanted.type != "json_schema" and wanted.json_schema is not None:
            raise bad_request(
                "`response_format` takes a schema with the type json_schema only.",
                "response_format.json_schema",
            )
        if wanted.type == "json_object":
            found["response_format"] = Constraint(kind="json_object")
        elif wanted.type == "json_schema":
            if wanted.json_schema is None:
                raise bad_request(
                    "`response_format.json_schema` is required with the type json_schema.",
                    "response_format.json_schema",
                    "missing_required_parameter",
                )
            schema = wanted.json_schema.schema_
            kind: ConstraintKind = "json_object" if schema is None else "json_schema"
            found["response_format.json_schema"] = Constraint(kind=kind, text=schema or "")
    if request.structured_outputs is not None:
        found |= _structured(request.structured_outputs)
    found |= _by_field(
        "guided_",
        request.guided_json,
        request.guided_regex,
        request.guided_choice,
        request.guided_grammar,
        compact=False,
    )
    by_sglang: tuple[tuple[str, ConstraintKind, str | None], ...] = (
        ("json_schema", "json_schema", request.json_schema),
        ("regex", "regex", request.regex),
        ("ebnf", "grammar", request.ebnf),
    )
    found |= {name: Constraint(kind=kind, text=text) for name, kind, text in by_sglang if text is not None}
    if not found:
        return None
    (first, constraint), *others = found.items()
    for other, its_constraint in others:
        # Told twice is told once: Guidance's client of vLLM sends a grammar by its old name and its new one.
        if its_constraint != constraint:
            raise bad_request(
                f"`{other}` and `{first}` both say what the answer is; give one of them.", other
            )
    return constraint, first


def _structured(asked: StructuredOutputs) -> dict[str, Constraint]:
    compact = bool(asked.disable_any_whitespace)
    schema = asked.json_
    if schema is not None and asked.disable_additional_properties:
        try:
            schema = json.dumps(_closed(json.loads(schema)))
        except RecursionError:
            field = "structured_outputs.json"
            raise bad_request(f"`{field}` is nested too deeply to be closed.", field) from None
    found = _by_field(
        "structured_outputs.", schema, asked.regex, asked.choice, asked.grammar, compact=compact
    )
    if asked.json_object:
        found["structured_outputs.json_object"] = Constraint(kind="json_object", compact=compact)
    if not found:
        raise bad_request(
            "`structured_outputs` needs one of json, regex, choice, grammar and json_object.",
            "structured_outputs",
        )
    return found


def _closed(schema: Any) -> Any:
    """A JSON schema whose objects have the properties it names, and others only where it speaks of them."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: part if name in _VALUES else _closed_part(name, part) for name, part in schema.items()}
    is_object = schema.get("type") == "object" or isinstance(schema.get("properties"), dict)
    if is_object and not _SPEAK_OF_OTHERS & schema.keys():
        closed["additionalProperties"] = False
    return closed


def _closed_part(keyword: str, part: Any) -> Any:
    if keyword in BY_NAME and isinstance(part, dict):
        return {name: _closed(schema) for name, schema in part.items()}
    return _closed(part)


def _by_field(
    prefix: str,
    schema: str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    *,
    compact: bool,
) -> dict[str, Constraint]:
    found: dict[str, Constraint] = {}
    if schema is not None:
        found[prefix + "json"] = Constraint(kind="json_schema", text=schema, compact=compact)
    if regex is not None:
        found[prefix + "regex"] = Constraint(kind="regex", text=regex)
    if choice is not None:
        found[prefix + "choice"] = Constraint(kind="choice", text=json.dumps(choice))
    if grammar is not None:
        found[prefix + "grammar"] = Constraint(kind="grammar", text=grammar)
    return found


class ConstraintCheck:
    """Compiles what requests ask for before the cell hears of it: a step of the target should not wait."""

    def __init__(self, codec: TextCodec) -> None:
        """Over the target's tokenizer, which is prepared with the first constraint."""
        self._codec = codec
        self._grammars: Grammars | None = None

    async def resolve(self, request: StructuredFields, use: ToolUse, vocab_size: int) -> Constraint | None:
        """The constraint of a request.

        A format is of the text of an answer. A call that must be made leaves none; where one may be made, the
        answer is calls, or of the format.

        Args:
            request: its fields.
            use: what its tools mean: a call that must be made has to look like one.
            vocab_size: of the target.

        Raises:
            ApiError: (400) with llguidance's message, the field at fault, and the tool if it is one's schema.
        """
        asked = constraint_of(request)
        try:
            forced = use.constraint
        except (ValueError, RecursionError) as error:
            raise await self._refusal(str(error), "tools", use, vocab_size) from None
        has_format = asked is not None and asked[1].startswith("response_format")
        if forced is not None and has_format:
            asked = None
        if asked is not None and forced is not None:
            raise bad_request(
                f"`{asked[1]}` and a `tool_choice` that forces a call both say what the answer is; give one.",
                asked[1],
            )
        if forced is not None:
            asked = forced, "tools"
        if asked is None:
            return None
        constraint, field = asked
        _check_combination(request, field)
        if len(constraint.text) > MAX_TEXT:
            raise bad_request(
                f"`{field}` has {len(constraint.text)} characters; at most {MAX_TEXT} are taken.", field
            )
        if has_format and forced is None and use.parses:
            return await self._with_calls(constraint, field, use, vocab_size)
        return await self._compiled(constraint, field, use, vocab_size)

    async def _with_calls(self, answer: Constraint, field: str, use: ToolUse, vocab_size: int) -> Constraint:
        # What is wrong with it is told without the calls.
        await self._compiled(answer, field, use, vocab_size)
        try:
            *exact, loose = use.calls_or(answer)
        except RecursionError:
            raise bad_request(
                f"`{field}` and `tools` have a schema that is nested too deeply.", field
            ) from None
        for constraint in exact:
            with suppress(ApiError):  # the other takes these calls, too
                return await self._compiled(constraint, field, use, vocab_size)
        return await self._compiled(loose, field, use, vocab_size)

    async def _compiled(
        self, constraint: Constraint, field: str, use: ToolUse, vocab_size: int
    ) -> Constraint:
        reason = await _why_not(self._of(vocab_size), constraint)
        if reason is None:
            return constraint
        raise await self._refusal(reason, field, use, vocab_size)

    async def _refusal(self, reason: str, field: str, use: ToolUse, vocab_size: int) -> ApiError:
        """Of a constraint, with the function whose schema is at fault if it is one's."""
        for name, arguments in use.constraints.items():  # of a call that must be made
            if (of_tool := await _why_not(self._of(vocab_size), arguments)) is not None:
                reason = f"the schema of the function '{name}': {of_tool}"
                break
        message = f"`{field}` cannot be used: {reason}"
        return ApiError(400, message, param=field, code="invalid_constraint")

    def _of(self, vocab_size: int) -> Grammars:
        if self._grammars is None:
            text, ends = self._codec.tokenizer_json(), sorted(self._codec.eos_ids)
            self._grammars = Grammars(partial(make_tokenizer, text, ends, vocab_size), vocab_size=vocab_size)
        return self._grammars


async def _why_not(grammars: Grammars, constraint: Constraint) -> str | None:
    """Why a constraint cannot be compiled; None if it can."""
    compiling = grammars.prepare(constraint)
    try:
        await asyncio.shield(asyncio.wrap_future(compiling))
    except GrammarError as error:
        return str(error)
    return None


def _check_combination(request: Any, field: str) -> None:
    """A grammar says which tokens are possible; others that say so could leave none."""
    for name in ("ignore_eos", "allowed_token_ids", "bad_words"):
        if getattr(request, name, None):
            raise bad_request(f"`{name}` cannot be combined with `{field}`; leave one of them out.", name)
