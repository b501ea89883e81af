"""Constraints in llguidance's notation."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, grammar_from

from engine.constraint import Constraint
from engine.schema_parts import VALUES, schema_parts

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

#: Most characters of a constraint's text.
MAX_TEXT = 64 * 1024

# JSON stays on one line: a model that likes whitespace would otherwise write nothing else to the end.
_SPACED: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_COMPACT: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
# Of what JSON may write behind a backslash, all but codes (`\u0061`), behind which a key could hide.
_PLAIN_ESCAPES = 'nrbtf\\"'
_START = "start: "
# Characters for which llguidance has no other spelling.
_NEEDS_CODE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


def source_of(constraint: Constraint) -> str:
    """The constraint in llguidance's notation; raises ValueError if its text is not even readable."""
    if len(constraint.text) > MAX_TEXT:
        raise ValueError(f"{len(constraint.text)} characters; at most {MAX_TEXT} are taken")
    match constraint.kind:
        case "json_object" | "json_schema":
            schema = constraint.text if constraint.kind == "json_schema" else '{"type":"object"}'
            return _json_source(schema, compact=constraint.compact)
        case "regex":
            return str(LLMatcher.grammar_from_regex(constraint.text))
        case "grammar":
            try:
                return str(grammar_from("grammar", constraint.text))  # Lark, or GBNF turned into it
            except RecursionError as error:
                raise ValueError(str(error)) from None
        case "choice":
            # A regular expression may begin and end with any character, and one of no characters is fine.
            quoted = "|".join(_quote(choice) for choice in json.loads(constraint.text))
            return str(LLMatcher.grammar_from_regex(f"({quoted})"))


def json_rule(schema: str, *, compact: bool = False) -> str:
    """JSON of a schema as part of a rule in Lark, written as under a constraint of that schema alone."""
    return _lark(_json_source(schema, compact=compact)).removeprefix(_START)


def unforced(source: str) -> str:
    """A grammar in Lark that leaves open how text is spelled where there is no choice what it is."""
    return '%llguidance {"no_forcing": true}\n' + _lark(source)


def _json_source(schema: str, *, compact: bool) -> str:
    options: JsonCompileOptions = {**(_COMPACT if compact else _SPACED)}
    source = str(LLMatcher.grammar_from_json_schema(schema, overrides=options))  # says what cannot be read
    if not _has_other_keys(parts := [*schema_parts(json.loads(schema))]):
        return source
    if _holds_codes(parts):
        raise ValueError(
            "`const` or `enum` holds control characters, which JSON spells by their codes (\\u0001); where "
            "objects may have other properties than they name, no codes are taken, since names could hide "
            "behind them: give such objects `additionalProperties: false`"
        )
    options["json_allowed_escapes"] = _PLAIN_ESCAPES
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=options))


def _has_other_keys(parts: list[dict[str, Any]]) -> bool:
    """Whether an object says what is under some keys, and may have others.

    To llguidance `"\\u0061"` is another key than `"a"`, and for who reads the answer it is the same.
    """
    return any(
        (part.get("properties") or part.get("patternProperties"))
        and part.get("additionalProperties") is not False
        for part in parts
    )


def _holds_codes(parts: list[dict[str, Any]]) -> bool:
    left = [part[name] for part in parts for name in VALUES & part.keys()]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value
        elif isinstance(value, str) and _NEEDS_CODE.search(value):
            return True
    return False


def _lark(source: str) -> str:
    if not source.startswith("{"):
        return source
    (grammar,) = json.loads(source)["grammars"]
    schema, lark = grammar["json_schema"], grammar["lark_grammar"]
    return str(lark) if schema is None else f"{_START}%json {json.dumps(schema)}"


def _quote(text: str) -> str:
    """A regular expression of exactly `text`: every character that could mean something, by its number."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)
