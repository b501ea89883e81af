"""What parsers of calls have in common whose arguments are in tags instead of JSON."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence

from deployments.tagged_values import Schemas, types_of, value_text
from deployments.tool_calls import CallsInText, Parsed


class TaggedCalls(CallsInText):
    """Values are of the types of the function's schema; strings are told as they are written.

    A value is a string as it stands unless the schema has other types for it, and it reads as one of those.
    Other values than strings are told when they are complete.
    """

    def __init__(self, schemas: Schemas, most: int | None = None) -> None:
        """Of the functions that have a schema, or None, there."""
        super().__init__(schemas, most)
        self._schemas = schemas
        self._function = ""  # of the call that is being read
        self._is_in_value = False  # of one of its arguments
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []  # unless it is a string, for that is told at once
        self._num_arguments = 0

    def finish(self) -> Parsed:
        """See `ToolParser`; what is held of a call that was cut off is (the beginning of) a tag."""
        parsed = Parsed()
        if not self._function:
            self._add_text(self._held, parsed)
        self._held = ""
        return parsed

    def _advance(self, parsed: Parsed) -> bool:
        if self._is_in_value:
            return self._read_value(parsed)
        if self._function:
            return self._read_function(parsed)
        return self._read_text(parsed)

    @abstractmethod
    def _head(self) -> tuple[str | None, int]:
        """The name of the function that what is held begins to call, and where its arguments begin.

        The name is empty if that is no call, and None as long as it is not known.
        """

    @abstractmethod
    def _read_text(self, parsed: Parsed) -> bool:
        """What comes before a call, and how that begins."""

    @abstractmethod
    def _read_function(self, parsed: Parsed) -> bool:
        """How the next argument begins, or the call ends; what else stands between arguments says nothing."""

    @abstractmethod
    def _read_value(self, parsed: Parsed) -> bool:
        """An argument, or more of it."""

    def _find_call(self, markers: Sequence[str], parsed: Parsed) -> bool:
        """What `_read_text` does where a call begins with one of the markers."""
        at, marker = self._first(markers)
        self._add_text(self._held[:at], parsed)
        self._held = self._held[at:]
        if not marker:
            return False
        name, size = self._head()
        if name is None:
            return False
        if name:
            self._teller.begin(name, "", parsed)
            self._function, self._num_arguments = name, 0
        else:  # looked at again, as a call may follow in it
            size = len(marker)
            self._add_text(marker, parsed)
        self._held = self._held[size:]
        return True

    def _begin_argument(self, key: str, parsed: Parsed) -> None:
        self._is_in_value, self._value = True, []
        self._types = types_of(self._schemas[self._function], key)
        opening = "{" if not self._num_arguments else ", "
        quote = '"' if self._types == {"string"} else ""
        self._teller.more(f"{opening}{json.dumps(key, ensure_ascii=False)}: {quote}", parsed)
        self._num_arguments += 1

    def _more_value(self, ends: Sequence[str], parsed: Parsed) -> bool:
        """What is held up to one of the markers that end a value; whether it ended."""
        at, marker = self._first(ends)
        value, self._held = self._held[:at], self._held[at:]
        is_string = self._types == {"string"}
        if is_string:
            self._teller.more(json.dumps(value, ensure_ascii=False)[1:-1], parsed)
        else:
            self._value.append(value)
        if not marker:
            return False
        self._teller.more('"' if is_string else value_text("".join(self._value), self._types), parsed)
        self._is_in_value = False
        return True

    def _end_call(self, parsed: Parsed) -> None:
        self._teller.more("}" if self._num_arguments else "{}", parsed)
        self._function, self._skips_space = "", True
