"""What a JSON schema says that llguidance would pass over without a word, though it is to say something."""

from __future__ import annotations

import re
from typing import Any

from engine.schema_parts import schema_parts

# The first draft that knows a keyword; of a schema that names an older one it would be ignored.
_SINCE = {
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("else", "if", "then"), 7),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "maxContains", "minContains"), 2019),
    **dict.fromkeys(("$recursiveRef", "unevaluatedItems", "unevaluatedProperties"), 2019),
    **dict.fromkeys(("$dynamicRef", "prefixItems"), 2020),
}
# Those of the third draft, whose schemas llguidance reads as it does those of the latest.
_OF_DRAFT_3 = ("disallow", "divisibleBy", "extends")
_DRAFT = re.compile(r"^https?://json-schema\.org/draft(?:-0|/)(\d+)")
_OPTIONS = "x-guidance"
# Options of llguidance under which keywords are ignored, or mean something else.
_LENIENT = ("coerce_one_of", "lenient")


def why_ignored(schema: Any, *, takes_options: bool) -> str | None:
    """The first keyword of a schema that would be passed over, and what to do; None if there is none.

    Args:
        schema: JSON.
        takes_options: whether it may set options of llguidance (`x-guidance`), as in a grammar in Lark.
    """
    named = _DRAFT.match(str(schema.get("$schema"))) if isinstance(schema, dict) else None
    draft = int(named[1]) if named else 0
    for part in schema_parts(schema):
        reason = _about_options(part, takes_options) or _about_null(part) or _about_draft(part, draft)
        if reason is not None:
            return reason
    return None


def _about_options(schema: dict[str, Any], takes_options: bool) -> str | None:
    options = schema.get(_OPTIONS)
    if options is None:
        return None
    if not takes_options:
        return (
            f"`{_OPTIONS}` is no keyword of JSON schemas: how JSON is written is the server's to say "
            "(`disable_any_whitespace` of `structured_outputs`)"
        )
    for name in _LENIENT:
        if isinstance(options, dict) and options.get(name):
            return f"`{name}` of `{_OPTIONS}` would have keywords ignored, which is not done here"
    return None


def _about_null(schema: dict[str, Any]) -> str | None:
    if schema.get("nullable") is not True:
        return None
    return (
        "`nullable` of OpenAPI is followed where a `type` stands beside it and nothing else there rules "
        'null out, and not here: say so in JSON Schema, as {"anyOf": [..., {"type": "null"}]}'
    )


def _about_draft(schema: dict[str, Any], draft: int) -> str | None:
    for name in schema:
        if 3 < draft < _SINCE.get(name, 0) or (draft == 3 and name in _OF_DRAFT_3):
            return (
                f"`{name}` would be ignored, since `$schema` names draft {draft}: leave `$schema` out, or "
                "say it as a schema of that draft does"
            )
    return None
