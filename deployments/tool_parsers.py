"""Calls of tools in a model's output: from text that arrives in pieces to text and whole calls.

What comes out does not depend on how the text was cut into pieces. A call is told once it is complete and is
valid JSON with the name of a tool that there is; anything else stays the text it is, so that nothing is lost.
Calls that the client forces are another matter: such an answer is no text for anybody, and if it was cut off,
its last call is told as far as it goes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from deployments.mistral_calls import MistralCalls
from deployments.tool_calls import (
    DECODER,
    CallDelta,
    CallsInText,
    NewId,
    Parsed,
    ToolParser,
    calls_in,
    json_text,
    mistral_id,
    openai_id,
    overlap,
    read_call,
    whole_call,
)

#: How each kind of model writes a call, in the words it is told when its template cannot tell it.
CallText = {
    "hermes": '<tool_call>\n{"name": <function name>, "arguments": <arguments object>}\n</tool_call>',
    "json": '{"name": <function name>, "parameters": <arguments object>}',
    "mistral": '[TOOL_CALLS] [{"name": <function name>, "arguments": <arguments object>}]',
}


class HermesCalls(CallsInText):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in a text, as Hermes and Qwen write."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    markers: tuple[str, ...] = (OPEN, CLOSE)

    def feed(self, text: str) -> Parsed:
        """See `ToolParser`."""
        self._held += text
        parsed = Parsed()
        while True:
            marker = self.CLOSE if self._is_inside else self.OPEN
            before, found, after = self._held.partition(marker)
            if not found:
                break
            self._held = after
            if self._is_inside:
                self._close(before, parsed)
            else:
                self._add_text(before, parsed)
            self._is_inside = not self._is_inside
        if not self._is_inside:
            held = overlap(self._held, self.OPEN)
            self._add_text(self._held[: len(self._held) - held], parsed)
            self._held = self._held[len(self._held) - held :]
        return parsed

    def finish(self) -> Parsed:
        """See `ToolParser`; a call that was cut off is text."""
        parsed = Parsed()
        held, self._held = self._held, ""
        if self._is_inside:
            # Some models end their turn instead of closing the last call.
            calls = calls_in(held, self._names, ("arguments", "parameters"))
            if calls is not None:
                self._add_calls(calls, parsed, openai_id)
                return parsed
            held = self.OPEN + held
        self._add_text(held, parsed)
        return parsed

    def _close(self, body: str, parsed: Parsed) -> None:
        calls = calls_in(body, self._names, ("arguments", "parameters"))
        if calls is None:
            self._add_text(f"{self.OPEN}{body}{self.CLOSE}", parsed)
        else:
            self._add_calls(calls, parsed, openai_id)


class JsonCalls:
    """An answer that is nothing but calls, `{"name": ..., "parameters": {...}}`, as Llama 3 models write.

    Several are separated by `;` or white space, or are a list. Text that begins in any other way is text.
    """

    TAG = "<|python_tag|>"
    is_forced = False
    markers: tuple[str, ...] = (TAG,)

    def __init__(
        self,
        names: Collection[str],
        most: int | None = None,
        *,
        has_text: bool = True,
        new_id: NewId = openai_id,
    ) -> None:
        """As `HermesCalls`; without text, as decoding was constrained to calls, only calls are told."""
        self.has_text = has_text
        self._new_id = new_id
        self._names = names
        self._most = most
        self._held = ""
        self._turned_out = ""  # "text", once it cannot be calls (any more)
        self._is_list = False
        self._began = False
        self.num_calls = 0

    def feed(self, text: str) -> Parsed:
        """See `ToolParser`."""
        if self._turned_out == "text":
            return Parsed(text if self.has_text else "")
        self._held += text
        parsed = Parsed()
        while self._turned_out != "text" and self._advance(parsed):
            pass
        if self._turned_out == "text" and not self.num_calls:
            parsed.content += self._held
            self._held = ""
        if not self.has_text:
            parsed.content = ""
        return parsed

    def finish(self) -> Parsed:
        """See `ToolParser`."""
        held, self._held = self._held, ""
        if not self.has_text:
            return Parsed(calls=self._begun(held))
        # After calls, only their punctuation is left; before, it is an answer that was cut off.
        return Parsed(held.strip(" \t\r\n;,]") if self.num_calls else held)

    def _begun(self, held: str) -> list[CallDelta]:
        """The call that was cut off, if its name was complete."""
        match = _BEGUN.match(held)
        if match is None or (self._most is not None and self.num_calls >= self._most):
            return []
        name, arguments = json.loads(match[1]), match[2] or ""
        if name not in self._names:
            return []
        try:
            value, _ = DECODER.raw_decode(arguments)
            arguments = json_text(value)
        except (ValueError, RecursionError):
            pass  # not complete
        self.num_calls += 1
        return [whole_call(self.num_calls - 1, (name, arguments), self._new_id)]

    def _advance(self, parsed: Parsed) -> bool:
        """Take one step through what is held; whether another may follow at once."""
        held = self._held.lstrip(" \t\r\n;,") if self._began else self._held.lstrip()
        if not self._began:
            if self.TAG.startswith(held[: len(self.TAG)]):
                if len(held) < len(self.TAG):
                    return False
                held = held[len(self.TAG) :].lstrip()
            if not held:
                return False
            if held[0] == "[":
                self._is_list, held = True, held[1:].lstrip()
            if not held:
                return False
            if held[0] != "{":
                self._turned_out = "text"
                return False
        elif not held or (self._is_list and held[0] == "]"):
            return False
        try:
            value, end = DECODER.raw_decode(held)
        except ValueError:
            if not self._began:
                self._is_list = False  # looked at again, with its bracket, when more has come
            return False
        except RecursionError:  # nested as no call is
            self._turned_out = "text"
            return False
        call = read_call(value, self._names, ("parameters", "arguments"), any_type=not self.has_text)
        if call is None:
            self._turned_out = "text"
            if self.num_calls:
                parsed.content += held
                self._held = ""
            return False
        self._began, self._held = True, held[end:]
        if self._most is None or self.num_calls < self._most:
            parsed.calls.append(whole_call(self.num_calls, call, self._new_id))
            self.num_calls += 1
        return True


class NamedCall:
    """An answer that is nothing but the arguments of one call; each piece of it is told as it comes."""

    markers: tuple[str, ...] = ()
    is_forced = True
    has_text = False

    def __init__(self, name: str, new_id: NewId = openai_id) -> None:
        self._name = name
        self._new_id = new_id
        self.num_calls = 0

    def feed(self, text: str) -> Parsed:
        """See `ToolParser`."""
        if self.num_calls:
            return Parsed(calls=[CallDelta(0, text)] if text else [])
        if not text:
            return Parsed()
        self.num_calls = 1
        return Parsed(calls=[whole_call(0, (self._name, text), self._new_id)])

    def finish(self) -> Parsed:
        """See `ToolParser`."""
        return Parsed()


#: What is left of a list of calls that ends within one: its name, and its arguments as far as they go.
_BEGUN = re.compile(
    r"""[\s;,\[]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")(?:\s*,\s*"parameters"\s*:\s*(.*))?""", re.DOTALL
)

_PARSERS: dict[str, Callable[[Collection[str], int | None], ToolParser]] = {
    "hermes": HermesCalls,
    "json": JsonCalls,
    "mistral": MistralCalls,
}


def make_parser(kind: str, names: Collection[str], most: int | None = None) -> ToolParser:
    """The parser of that kind (of `CallText`) for functions `names`, telling at most `most` calls."""
    return _PARSERS[kind](names, most)


def new_id_of(kind: str) -> NewId:
    """How ids of calls are made for a model that writes them so: its template may demand a form."""
    return mistral_id if kind == "mistral" else openai_id


def kind_for_template(template: str) -> str:
    """How a model with that chat template writes calls, "none" if it shows no way."""
    if HermesCalls.OPEN in template:
        return "hermes"
    if MistralCalls.OPEN in template:
        return "mistral"
    if "tools" in template and '"parameters"' in template:
        return "json"
    return "none"
