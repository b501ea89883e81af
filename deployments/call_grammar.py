"""Grammars of answers that are calls of tools, as a model writes them, or else what a format asks for.

No white space stands before a call: models write some out of habit, as behind a thought, and where it is
possible before calls only, nothing but a call could follow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from deployments.cohere_calls import CohereCalls
from deployments.deepseek_calls import DeepseekCalls
from deployments.functionary_calls import FunctionaryCalls
from deployments.gemma_calls import QUOTE, GemmaCalls
from deployments.glm_calls import GlmCalls
from deployments.json_calls import JsonCalls
from deployments.kimi_calls import KimiCalls
from deployments.marked_calls import (
    GigaChatCalls,
    GraniteCalls,
    HermesCalls,
    HunyuanCalls,
    MarkedCalls,
    NemotronCalls,
    PhiCalls,
)
from deployments.mistral_calls import MistralCalls
from deployments.python_calls import OlmoCalls
from deployments.qwen_coder_calls import MiniMaxCalls, QwenCoderCalls, SeedCalls
from deployments.tagged_values import Schemas
from engine.constraint import Constraint
from engine.grammar_source import json_rule

TokenOf = Callable[[str], int | None]

_ANYTHING = {"type": "object"}
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
_MISTRAL_ID = "/[a-zA-Z0-9]{9}/"
# Any name of a parameter in a tag.
_ANY_KEY = r"/[^>\"\n]+/"
# Between such tags.
_ANY_GLM_KEY = r"/[^<\n]+/"
# Where no quotes stand around it.
_ANY_BARE_KEY = r"/[a-zA-Z_][a-zA-Z0-9_-]*/"
_NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/"
_PYTHON_STRING = r"""/"([^"\\\n]|\\.)*"|'([^'\\\n]|\\.)*'/"""


def calls_or(
    answer: Constraint,
    kind: str,
    schemas: Schemas,
    token_of: TokenOf,
    *,
    parallel: bool = True,
    any_arguments: bool = False,
) -> Constraint:
    """The constraint of an answer that is either of both.

    Args:
        answer: what the text must look like, JSON.
        kind: how the model writes calls, of `deployments.tool_parsers.FORMS`.
        schemas: of the functions' arguments, by name.
        token_of: the token that a marker is, if it is one.
        parallel: whether there may be several calls.
        any_arguments: whether the schemas are passed over, and any object is taken.
    """
    rules = _Rules(schemas, token_of, any_arguments=any_arguments)
    calls = _WRITERS[kind](rules, parallel)
    schema = answer.text if answer.kind == "json_schema" else json.dumps(_ANYTHING)
    lines = ["start: answer | calls", f"answer: {json_rule(schema, compact=answer.compact)}"]
    return Constraint(kind="grammar", text="\n".join([*lines, f"calls: {calls}", *rules.lines]))


class _Rules:
    """What the rules of calls consist of; arguments as of `calls_or`.

    Attributes:
        lines: the rules written so far.
    """

    def __init__(self, schemas: Schemas, token_of: TokenOf, *, any_arguments: bool) -> None:
        self.schemas: dict[str, Mapping[str, Any]] = {
            name: _ANYTHING if any_arguments else (schema or _NOTHING) for name, schema in schemas.items()
        }
        self.lines: list[str] = []
        self._token_of = token_of

    def token(self, marker: str) -> str:
        """A marker that is a token; empty if it is none."""
        token = self._token_of(marker)
        return "" if token is None else f"<[{token}]>"

    def marker(self, marker: str) -> str:
        """The token that a marker is, else its text."""
        return self.token(marker) or _text(marker)

    def optional(self, marker: str, then: str = "") -> str:
        """A marker that may be left out with what follows it; nothing where it is no token."""
        token = self.token(marker)
        return f"({token} {then})?" if token else ""

    def takers(self) -> list[tuple[list[str], Mapping[str, Any]]]:
        """Names of functions that take the same arguments, and what these must look like."""
        found: dict[str, tuple[list[str], Mapping[str, Any]]] = {}
        for name, schema in self.schemas.items():
            found.setdefault(json.dumps(schema), ([], schema))[0].append(name)
        return list(found.values())

    def add_object(self, key: str, name_key: str = "name", optional: Schemas | None = None) -> str:
        """The rule of a call as an object, of which `key` holds the arguments.

        Before these stands the name, and before that may stand what is `optional`.

        It is JSON as the format is: of two ways to write it, llguidance's lexer would keep to the one whose
        pieces are longer.
        """
        calls = []
        for names, schema in self.takers():
            # With an id it is a document of its own: references such as `#/$defs/City` stay within it.
            required = {name_key: {"enum": names}, key: {"$id": "arguments:", **schema}}
            properties = {**(optional or {}), **required}
            call = {"type": "object", "properties": properties, "required": list(required)}
            calls.append(json_rule(json.dumps({**call, "additionalProperties": False})))
        self.lines += [f"object{number}: {call}" for number, call in enumerate(calls)]
        self.lines.append(f"object: {_either(f'object{number}' for number in range(len(calls)))}")
        return "object"


def _marked(form: type[MarkedCalls], rules: _Rules, parallel: bool) -> str:
    """An object or a list of them behind the marker."""
    call, opened = rules.add_object("arguments"), rules.marker(form.OPEN)
    closed = rules.marker(form.CLOSE) if form.CLOSE else ""
    more = f' ("," " "? {call})*' if parallel else ""
    return f'{opened} " "? ("[" {call}{more} "]" | {call}) {closed}'


def _cohere(rules: _Rules, parallel: bool) -> str:
    """A list, each call on a line of its own or not; the models may count them."""
    call = rules.add_object(
        "parameters", "tool_name", {"tool_call_id": {"type": "string", "pattern": "^[0-9]{1,4}$"}}
    )
    rules.lines.append('line: "\\n" | "\\n    " | " "')
    more = f' ("," line? {call})*' if parallel else ""
    opened, closed = rules.marker(CohereCalls.OPEN), rules.marker(CohereCalls.CLOSE)
    return f'{opened} "[" line? {call}{more} "\\n"? "]" {closed}'


def _hermes(rules: _Rules, parallel: bool) -> str:
    call = rules.add_object("arguments")
    opened, closed = rules.marker(HermesCalls.OPEN), rules.marker(HermesCalls.CLOSE)
    rules.lines.append(f'call: {opened} "\\n"? {call} "\\n"? {closed}')
    return _lines("call", parallel)


def _json(rules: _Rules, parallel: bool) -> str:
    call = rules.add_object("parameters")
    more = f' ((";" " "? | "\\n") {call})*' if parallel else ""
    return f"{rules.optional(JsonCalls.TAG)} {call}{more}"


def _mistral(rules: _Rules, parallel: bool) -> str:
    """In both forms, of which a model knows one."""
    call, opened = rules.add_object("arguments"), rules.marker(MistralCalls.OPEN)
    _, identified, begun = MistralCalls.markers
    head = f"{rules.optional(identified, _MISTRAL_ID)} {rules.optional(begun)}"
    named = []
    for number, (names, schema) in enumerate(rules.takers()):
        rules.lines.append(f"arguments{number}: {json_rule(json.dumps(schema))}")
        named.append(f"{_either(map(_text, names))} {head} arguments{number}")
    rules.lines.append(f"named: {opened} {_either(named)}")
    more = f' ("," " "? {call})*' if parallel else ""
    return f'{opened} " "? "[" {call}{more} "]" | named{"+" if parallel else ""}'


def _deepseek(rules: _Rules, parallel: bool) -> str:
    """In both forms, of which a model knows one."""
    opened, closed, begun, ended, separator = map(rules.marker, DeepseekCalls.markers)
    calls = []
    for number, (names, schema) in enumerate(rules.takers()):
        rules.lines.append(f"arguments{number}: {json_rule(json.dumps(schema))}")
        name = _either(map(_text, names))
        calls += [
            f'{begun} "function" {separator} {name} "\\n```json\\n" arguments{number} "\\n```" {ended}',
            f"{begun} {name} {separator} arguments{number} {ended}",
        ]
    rules.lines.append(f"call: {_either(calls)}")
    return f"{opened} {_lines('call', parallel)} {closed}"


def _kimi(rules: _Rules, parallel: bool) -> str:
    """Each call with its number."""
    opened, closed, begun, ended, separator = map(rules.marker, KimiCalls.markers)
    calls = []
    for number, (names, schema) in enumerate(rules.takers()):
        rules.lines.append(f"arguments{number}: {json_rule(json.dumps(schema))}")
        name = _either(_text(f"functions.{name}:") for name in names)
        calls.append(f"{begun} {name} /[0-9]{{1,6}}/ {separator} arguments{number} {ended}")
    rules.lines.append(f"call: {_either(calls)}")
    return f"{opened} {'call+' if parallel else 'call'} {closed}"


def _functionary(rules: _Rules, parallel: bool) -> str:
    """Arguments in a tag of the function's name."""
    opened, closed = map(rules.marker, FunctionaryCalls.markers)
    calls = []
    for number, (names, schema) in enumerate(rules.takers()):
        rules.lines.append(f"arguments{number}: {json_rule(json.dumps(schema))}")
        calls.append(f"{opened} {_either(_text(name + '>') for name in names)} arguments{number} {closed}")
    rules.lines.append(f"call: {_either(calls)}")
    return _lines("call", parallel)


def _in_tags(form: type[QwenCoderCalls], rules: _Rules, parallel: bool) -> str:
    """Arguments are no JSON: parameters have the names of the schema, and any text as their values."""
    functions = [
        f"{_text(name + form.NAME_END)} {_parameters(form, schema)}" for name, schema in rules.schemas.items()
    ]
    opened, closed = rules.marker(form.OPEN), rules.marker(form.CLOSE)
    call = f'{_text(form.FUNCTION)} {_either(functions)} "\\n" {_text(form.FUNCTION_END)} "\\n"'
    rules.lines.append(f"value[suffix={_text(form.AROUND_VALUE + form.PARAMETER_END)}]: /(?s:.*)/")
    if form is MiniMaxCalls:  # the tag stands around all calls
        return f'{opened} "\\n" ({call}){"+" if parallel else ""} {closed}'
    rules.lines.append(f'call: {opened} "\\n" {call} {closed}')
    return _lines("call", parallel)


def _parameters(form: type[QwenCoderCalls], schema: Mapping[str, Any]) -> str:
    """As many parameters as there are, each with its name."""
    keys = _keys(schema, _ANY_KEY)
    end = _text(form.NAME_END + form.AROUND_VALUE)
    return f'("\\n" {_text(form.PARAMETER)} {keys} {end} value)*' if keys else ""


def _glm(rules: _Rules, parallel: bool) -> str:
    """As `_in_tags`; with line breaks between the tags, or without."""
    form = GlmCalls
    opened, closed, key, key_end, value, value_end = map(rules.marker, form.markers)
    functions = []
    for name, schema in rules.schemas.items():
        keys = _keys(schema, _ANY_GLM_KEY)
        pairs = f'("\\n"? {key} {keys} {key_end} "\\n"? {value} value)*' if keys else ""
        functions.append(f"{_text(name)} {pairs}")
    rules.lines.append(f'call: {opened} {_either(functions)} "\\n"? {closed}')
    if rules.token(form.VALUE_END):
        rules.lines.append(f"value: /(?s:.*)/ {value_end}")
    else:
        rules.lines.append(f"value[suffix={value_end}]: /(?s:.*)/")
    return _lines("call", parallel)


def _gemma(rules: _Rules, parallel: bool) -> str:
    """Values of any type, in their notation."""
    opened, closed, quote = map(rules.marker, GemmaCalls.markers)
    functions = []
    for name, schema in rules.schemas.items():
        keys = _keys(schema, _ANY_BARE_KEY)
        pair = f'{keys} ":" value'
        pairs = f'({pair} ("," {pair})*)?' if keys else ""
        functions.append(f'{_text(name)} "{{" {pairs} "}}"')
    pair = f'{_ANY_BARE_KEY} ":" value'
    if rules.token(QUOTE):
        rules.lines.append(f"string: {quote} /(?s:.*)/ {quote}")
    else:
        rules.lines += [f"string: {quote} quoted", f"quoted[suffix={quote}]: /(?s:.*)/"]
    rules.lines += [
        f'value: string | {_NUMBER} | "true" | "false" | "null" | "[" (value ("," value)*)? "]" '
        f'| "{{" ({pair} ("," {pair})*)? "}}"',
        f'call: {opened} "call:" {_either(functions)} {closed}',
    ]
    return "call+" if parallel else "call"


def _add_python_call(rules: _Rules) -> str:
    """The rule of a call in Python, with values of any type."""
    functions = []
    for name, schema in rules.schemas.items():
        keys = _keys(schema, _ANY_BARE_KEY)
        pair = f'{keys} "=" value'
        pairs = f'({pair} ("," " "? {pair})*)?' if keys else ""
        functions.append(f'{_text(name + "(")} {pairs} ")"')
    names = " | ".join(map(_text, ("True", "False", "None", "true", "false", "null")))
    rules.lines += [
        f"string: {_PYTHON_STRING}",
        f'value: string | {_NUMBER} | {names} | "[" (value ("," " "? value)*)? "]" '
        f'| "{{" (string ":" " "? value ("," " "? string ":" " "? value)*)? "}}"',
        f"call: {_either(functions)}",
    ]
    return "call"


def _python(rules: _Rules, parallel: bool) -> str:
    call = _add_python_call(rules)
    more = f' ("," " "? {call})*' if parallel else ""
    return f'"[" {call}{more} "]"'


def _olmo(rules: _Rules, parallel: bool) -> str:
    call = _add_python_call(rules)
    more = f' ("\\n" {call})*' if parallel else ""
    return f'{rules.marker(OlmoCalls.OPEN)} "\\n"? {call}{more} "\\n"? {rules.marker(OlmoCalls.CLOSE)}'


def _keys(schema: Mapping[str, Any], any_key: str) -> str:
    """What an argument may be called; empty where there is none."""
    properties = schema.get("properties")
    is_closed = schema.get("additionalProperties", False) is False and "patternProperties" not in schema
    if is_closed and isinstance(properties, Mapping):
        return _either(map(_text, properties)) if properties else ""
    return any_key


def _lines(rule: str, parallel: bool) -> str:
    return f'{rule} ("\\n"? {rule})*' if parallel else rule


def _either(rules: Iterable[str]) -> str:
    return f"({' | '.join(rules)})"


def _text(text: str) -> str:
    """Text as a rule; JSON's escapes are Lark's."""
    return json.dumps(text, ensure_ascii=False)


_WRITERS: dict[str, Callable[[_Rules, bool], str]] = {
    "cohere": _cohere,
    "deepseek_v3": _deepseek,
    "functionary_v3": _functionary,
    "gemma4": _gemma,
    "gigachat3": partial(_marked, GigaChatCalls),
    "glm": _glm,
    "granite": partial(_marked, GraniteCalls),
    "hermes": _hermes,
    "hunyuan_a13b": partial(_marked, HunyuanCalls),
    "json": _json,
    "kimi_k2": _kimi,
    "minimax_m2": partial(_in_tags, MiniMaxCalls),
    "mistral": _mistral,
    "nemotron": partial(_marked, NemotronCalls),
    "olmo3": _olmo,
    "phi4_mini": partial(_marked, PhiCalls),
    "pythonic": _python,
    "qwen3_coder": partial(_in_tags, QwenCoderCalls),
    "seed_oss": partial(_in_tags, SeedCalls),
}
