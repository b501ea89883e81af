"""Tools of a chat request: their definitions, which may be called, and what that asks of the decoder."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from deployments.call_grammar import TokenOf, calls_or
from deployments.channel_grammar import are_tokens, message_that_calls
from deployments.errors import bad_request
from deployments.harmony_calls import HarmonyCalls
from deployments.harmony_messages import described
from deployments.json_calls import JsonCalls, NamedCall
from deployments.request_model import DescribedModel, RequestModel
from deployments.tool_calls import FUNCTION_NAME, ToolParser
from deployments.tool_parsers import FORMS, make_parser, new_id_of
from engine.constraint import Constraint
from engine.grammar_source import MAX_TEXT
from engine.idle_keywords import without_idle

#: Most tools in one request. Coding agents with several servers of the Model Context Protocol send hundreds.
MAX_TOOLS = 1024

NAME = f"^{FUNCTION_NAME}$"


class FunctionDefinition(DescribedModel):
    """A function that the model may ask to have called."""

    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = Field(None, description="Accepted; a forced call always keeps to the schema.")


class Tool(DescribedModel):
    """OpenAI's wrapping of a function; there are no other kinds of tools."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(RequestModel):
    """Which function."""

    name: str = Field(pattern=NAME)


class NamedToolChoice(RequestModel):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(RequestModel):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolsChoice(RequestModel):
    """Only some of the tools, for now."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _tool_choice(value: Any) -> Any:
    """One message for all forms."""
    if value is None or value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict):
        if value.get("type") == "allowed_tools":
            return AllowedToolsChoice.model_validate(value)
        return NamedToolChoice.model_validate(value)
    form = (
        'must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
    )
    kind = "tool_choice_value" if isinstance(value, str) else "tool_choice_type"
    raise PydanticCustomError(kind, "{text}", {"text": form})


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice | None,
    BeforeValidator(_tool_choice),
]


class FunctionCall(DescribedModel):
    """A call as the model wrote it."""

    name: str = Field(pattern=NAME)
    arguments: str = Field(max_length=1 << 20, description="A JSON object, as text.")


class ToolCall(DescribedModel):
    """A call in an assistant's message of the conversation so far."""

    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


def _no_token(text: str) -> None:
    """Of a tokenizer that is not known."""


class ToolUse:
    """What the tools of one request mean for its prompt, its decoding and its output.

    Attributes:
        tools: for the chat template, in OpenAI's form; None if the model is not to hear of any.
        schema: JSON schema that the output must keep to; None if it is free.
        arguments: JSON schemas of what the calls may pass, by the functions' names; empty if it is free.
        is_required: whether some call must be made, so that the output is nothing but calls.
        in_messages: functions whose calls are messages of their own in the output (`HarmonyCalls`).
    """

    def __init__(
        self,
        tools: list[Tool] | None,
        choice: Any,
        parser: str,
        *,
        parallel: bool = True,
        token_of: TokenOf = _no_token,
        num_earlier: int = 0,
    ) -> None:
        """Raises `ApiError` (400) where the choice and the tools contradict each other, or no parser is set.

        Args:
            tools: of the request. choice: `tool_choice`. parallel: `parallel_tool_calls`.
            parser: how the model writes calls, "none" if that is not known.
            token_of: the token that a text is by itself, if it is one.
            num_earlier: calls that the conversation has already.
        """
        self.tools: list[dict[str, Any]] | None = None
        self.schema: dict[str, Any] | None = None
        self.arguments: dict[str, dict[str, Any]] = {}
        self._parser = parser
        self._schemas: dict[str, dict[str, Any] | None] = {}
        self._named = ""
        self._parallel = parallel
        self._token_of = token_of
        self._num_earlier = num_earlier
        self.in_messages: Collection[str] = ()
        if isinstance(choice, AllowedToolsChoice):
            tools, choice = _allowed(tools, choice.allowed_tools), choice.allowed_tools.mode
        self.is_required = choice == "required" or isinstance(choice, NamedToolChoice)
        if not tools:
            if self.is_required:
                raise bad_request("`tool_choice` asks for a call, but there are no `tools`.", "tool_choice")
            return
        names = [tool.function.name for tool in tools]
        if len(set(names)) < len(names):
            raise bad_request("`tools` names a function twice; names must differ.", "tools")
        if isinstance(choice, NamedToolChoice):
            self._named = choice.function.name
            if self._named not in names:
                raise bad_request(
                    f"`tool_choice` names '{self._named}', but `tools` has only: {', '.join(names)}.",
                    "tool_choice",
                )
        if choice == "none":
            return
        if parser == "none" and not self.is_required:
            raise bad_request(
                "`tools` cannot be used here: it is not known how this model writes calls. Set "
                "`target.tool_parser` in the server's configuration, or force a call by `tool_choice`.",
                "tools",
            )
        self.tools = [tool.model_dump(exclude_none=True) for tool in tools]
        if parser == "harmony":
            self.tools = described(self.tools)
        self._schemas = {tool.function.name: tool.function.parameters for tool in tools}
        if self.is_required:
            self.arguments = _arguments([tool for tool in tools if self._named in ("", tool.function.name)])
            self.schema = (
                self.arguments[self._named] if self._named else _schema(self.arguments, parallel=parallel)
            )
        if parser == "harmony" and (not self.is_required or are_tokens(token_of)):
            self.in_messages = self._schemas.keys()

    @property
    def forces_message(self) -> bool:
        """Whether the output must be messages, the last of which is a call."""
        return self.is_required and bool(self.in_messages)

    @property
    def constraint(self) -> Constraint | None:
        """What a forced call must look like."""
        if self.forces_message:
            return message_that_calls(self.arguments, self._token_of)
        return None if self.schema is None else _constraint(self.schema)

    @property
    def constraints(self) -> dict[str, Constraint]:
        """What the arguments of a forced call must look like, by the functions' names."""
        return {name: _constraint(schema) for name, schema in self.arguments.items()}

    def calls_or(self, answer: Constraint) -> list[Constraint]:
        """What an answer of the format `answer` looks like that may be calls the model chose, too.

        The last takes any arguments, where their schemas cannot be compiled or are too long together: calls
        that a model chooses are not held to them without a format, either. What is a message of its own is
        none of the answer that is told.
        """
        if self.in_messages:
            return [answer]
        is_long = len(json.dumps(self._schemas)) > MAX_TEXT
        schemas = self._schemas
        if not is_long:
            schemas = {name: one and without_idle(one, formats=True) for name, one in schemas.items()}
        found = []
        for any_arguments in (True,) if is_long else (False, True):
            try:
                found.append(
                    calls_or(
                        answer,
                        self._parser,
                        schemas,
                        self._token_of,
                        parallel=self._parallel,
                        any_arguments=any_arguments,
                    )
                )
            except ValueError:  # of a schema that llguidance cannot read: the other takes any arguments
                if any_arguments:
                    raise
        return found

    @property
    def parses(self) -> bool:
        """Whether the output may hold calls."""
        return self.tools is not None

    def make_parser(self) -> ToolParser | None:
        """For the output of one choice; None if it is text."""
        if not self.parses:
            return None
        if self.forces_message:
            return HarmonyCalls(self.arguments, 1, is_forced=bool(self._named), has_text=False)
        if self._named:
            return NamedCall(self._named, new_id_of(self._parser, self._num_earlier))
        most = None if self._parallel else 1
        if self.is_required:
            return JsonCalls(
                self._schemas, most, has_text=False, new_id=new_id_of(self._parser, self._num_earlier)
            )
        return make_parser(self._parser, self._schemas, most)

    def as_system_message(self) -> dict[str, str]:
        """The tools told in words, for a model whose template has no place for them."""
        form = FORMS.get(self._parser, FORMS["json"]).words
        listed = "\n".join(json.dumps(tool["function"]) for tool in self.tools or [])
        return {
            "role": "system",
            "content": f"You may call these functions, given by their JSON schemas:\n{listed}\n"
            f"To call one, answer with {form}",
        }


def _allowed(tools: list[Tool] | None, allowed: AllowedTools) -> list[Tool]:
    """Those of the tools that the model is to hear of; raises 400 for one that is not there."""
    wanted = {choice.function.name for choice in allowed.tools}
    found = [tool for tool in tools or () if tool.function.name in wanted]
    missing = sorted(wanted - {tool.function.name for tool in found})
    if missing:
        there = ", ".join(tool.function.name for tool in tools or ()) or "none"
        raise bad_request(
            f"`tool_choice.allowed_tools` names '{missing[0]}', but the `tools` are: {there}.",
            "tool_choice.allowed_tools",
        )
    return found


def _arguments(tools: list[Tool]) -> dict[str, dict[str, Any]]:
    """JSON schemas of what is passed to functions of which one must be called, by their names.

    Without what constrains nothing: generators of schemas write that, and one of hundreds of tools would rule
    all of them out. What is refused for its length is not looked through, for it may be megabytes.
    """
    empty: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    given = {tool.function.name: tool.function.parameters or empty for tool in tools}
    if len(json.dumps(given)) > 2 * MAX_TEXT:
        return given
    return {name: without_idle(schema, formats=True) for name, schema in given.items()}


def _constraint(schema: dict[str, Any]) -> Constraint:
    return Constraint(kind="json_schema", text=json.dumps(schema))


def _schema(arguments: dict[str, dict[str, Any]], *, parallel: bool) -> dict[str, Any]:
    """What calls look like of functions that take such arguments: a list."""
    ids = [schema.get("$id") for schema in arguments.values()]

    def document(number: int, schema: dict[str, Any]) -> dict[str, Any]:
        """With an id it is one of its own: references such as `#/$defs/City` stay within it."""
        has_own = ids[number] is not None and ids.count(ids[number]) == 1
        return schema if has_own else schema | {"$id": f"tool:{number}"}

    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": document(number, schema)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, (name, schema) in enumerate(arguments.items())
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    return schema
