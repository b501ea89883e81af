"""Ways to tell a conversation to chat templates that refuse it as it is."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

Message = dict[str, Any]


def ways_to_tell(messages: Sequence[Message], *, goes_on: bool) -> Iterator[list[Message]]:
    """The conversation as it is, and in the ways that other templates want it, to be tried in this order.

    - With all that systems say in front. Codex and Claude Code send a second one, or one in the midst of a
      conversation; some templates, as Qwen's since 3.5, refuse any but the first.
    - With that in front of what the user says first: Gemma 2's refuses any system.
    - Each with one call in a message, and its result behind: Llama 3's templates refuse several.
    - Each with the arguments of calls as text, which some templates (Functionary's) put together with others.

    Args:
        messages: as templates expect them.
        goes_on: whether the last message is to be gone on with, so that it stays the last.
    """
    for told in _with_systems(list(messages), goes_on=goes_on):
        yield told
        if any(len(message.get("tool_calls") or ()) > 1 for message in told):
            yield _with_single_calls(told)
        if any(message.get("tool_calls") for message in told):
            yield [_with_written_arguments(message) for message in told]


def _with_systems(messages: list[Message], *, goes_on: bool) -> Iterator[list[Message]]:
    yield messages
    said = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    if not said or (goes_on and messages[-1]["role"] == "system"):
        return
    text = "\n\n".join(said)
    if len(said) > 1 or messages[0]["role"] != "system":
        yield [{"role": "system", "content": text}, *others]
    if others and others[0]["role"] == "user":
        yield [others[0] | {"content": f"{text}\n\n{others[0]['content']}"}, *others[1:]]


def _with_single_calls(messages: Sequence[Message]) -> list[Message]:
    made: list[Message] = []
    left = deque(messages)
    while left:
        message = left.popleft()
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            made.append(message)
            continue
        results = []
        while left and left[0]["role"] == "tool":
            results.append(left.popleft())
        for call in calls:
            made.append(message | {"tool_calls": [call]})
            message = {"role": message["role"], "content": ""}  # what comes before calls is said once
            made += [one for one in results if one.get("tool_call_id") == call["id"]]
        called = {call["id"] for call in calls}
        made += [one for one in results if one.get("tool_call_id") not in called]
    return made


def _with_written_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"]
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(call | {"function": function | {"arguments": written}})
    return message | {"tool_calls": calls}
