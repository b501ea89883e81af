"""The grammar of an answer in channels that must be a call, in OpenAI's Harmony format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deployments import harmony
from deployments.call_grammar import TokenOf
from engine.constraint import Constraint
from engine.grammar_source import json_rule

_MARKS = (harmony.START, harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE, harmony.END)


def are_tokens(token_of: TokenOf) -> bool:
    """Whether the marks of messages are tokens, without which no grammar can tell them from text."""
    return all(token_of(mark) is not None for mark in _MARKS)


def message_that_calls(schemas: Mapping[str, Mapping[str, Any]], token_of: TokenOf) -> Constraint:
    """The constraint of an answer that is thoughts and then one call, as models write it.

    Args:
        schemas: of the functions' arguments, by name.
        token_of: the token that a mark is; all are tokens.
    """
    start, channel, constrain, message, end = (f"<[{token_of(mark)}]>" for mark in _MARKS)
    takers: dict[str, list[str]] = {}
    for name, schema in schemas.items():
        takers.setdefault(json_rule(json.dumps(schema)), []).append(json.dumps(name))
    named = [f"({' | '.join(names)})" for names in takers.values()]
    # Whom a message is for stands behind its channel, or in front of it as in the template.
    behind = [f'{one} " " {constrain} "json" {message} arguments{n}' for n, one in enumerate(named)]
    before = [
        f'{one} {channel} "commentary " {constrain}? "json" {message} arguments{n}'
        for n, one in enumerate(named)
    ]
    lines = [
        "start: thought* call",
        f'thought: {channel} "{harmony.ANALYSIS}" {message} text {end} {start} "assistant"',
        "text: /(?s:.*)/",
        f'call: {channel} "commentary to={harmony.FUNCTIONS}" ({" | ".join(behind)})'
        f' | " to={harmony.FUNCTIONS}" ({" | ".join(before)})',
        *(f"arguments{number}: {rule}" for number, rule in enumerate(takers)),
    ]
    return Constraint(kind="grammar", text="\n".join(lines))
