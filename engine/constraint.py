"""What the text of an answer must look like, free of torch so that the scheduler can hold it."""

from __future__ import annotations

from typing import Literal

import msgspec

ConstraintKind = Literal["json_object", "json_schema", "regex", "grammar", "choice"]


class Thought(msgspec.Struct, frozen=True, kw_only=True):
    """What a model may write before the answer: any tokens between two marks but those that end an answer.

    Attributes:
        open_token, close_token: the marks.
        is_open: whether the prompt ends within it; else the answer may begin with the first mark, or without
            a thought.
        header: what must follow the first mark, where it stands last, for the second one to end the thought,
            as in answers of several messages, each between such marks and with a header that says what it is.
        ends: tokens that end the answer in the midst of the thought, as a call does.
    """

    open_token: int
    close_token: int
    is_open: bool = False
    header: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """A formal language that holds every complete answer (`engine.grammar` compiles it).

    Attributes:
        kind: what `text` is.
        text: "json_schema": the schema as JSON; "regex": a regular expression that matches the whole answer;
            "grammar": a grammar in Lark's notation, as llguidance takes it, or GBNF; "choice": a JSON list
            of strings, one of which is the answer; "json_object": empty.
        compact: of the JSON kinds: no whitespace outside of strings. By default one space may follow each
            comma and colon.
        thought: what may come before it; nothing if None.
    """

    kind: ConstraintKind
    text: str = ""
    compact: bool = False
    thought: Thought | None = None
