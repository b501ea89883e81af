"""Conversations as the chat templates of models with channels read them, that is gpt-oss's."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from deployments.errors import bad_request
from deployments.harmony import MARKERS

_MARK = re.compile("|".join(map(re.escape, MARKERS)))


def in_channels(messages: Sequence[dict[str, Any]], *, goes_on: bool = False) -> list[dict[str, Any]]:
    """Messages of a conversation such that the template tells all that the model is to see again.

    By itself it tells what a system says at the beginning only, and of a message one call, whose function's
    every result behind it is taken to be. What is thought before a call is `thinking`; what is said there,
    which it would put into the same place, cannot stand beside it. It leaves both out, as it does thoughts,
    once something was said for good.

    Args:
        messages: as other chat templates expect them.
        goes_on: whether the last one is to be gone on with.

    Raises:
        ApiError: (400) if that one makes calls, behind which nothing goes on.
    """
    last = messages[-1]
    if goes_on and last.get("tool_calls"):
        raise bad_request(
            "`continue_final_message` cannot go on with a message that makes calls: this model ends there.",
            "continue_final_message",
        )
    others = [message for message in messages if message["role"] != "system"]
    said = [message["content"] for message in messages if message["role"] == "system"]
    found: list[dict[str, Any]] = [{"role": "system", "content": "\n\n".join(said)}] if said else []
    if goes_on and last["role"] == "system":  # it is to stay the last
        others, found = list(messages), []
    while others:
        calling = _while(others, lambda message: bool(message.get("tool_calls")))
        if calling:
            found += _one_by_one(calling, _while(others, lambda message: message["role"] == "tool"))
        else:
            found.append(_thinking(others.pop(0)))
    return found


def _while(
    messages: list[dict[str, Any]], is_wanted: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Those at the beginning that are wanted, which are taken away."""
    number = next((n for n, one in enumerate(messages) if not is_wanted(one)), len(messages))
    taken, messages[:number] = messages[:number], []
    return taken


def _one_by_one(calling: list[dict[str, Any]], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each call of some messages by itself, with its results.

    These name it; what names none of the calls is, in turn, of those that have no result, else of the last.
    """
    calls = [call for message in calling for call in message["tool_calls"]]
    ids = [call["id"] for call in calls]
    own: list[list[dict[str, Any]]] = [[] for _ in calls]
    unnamed = []
    for result in results:
        same = [n for n, one in enumerate(ids) if one == result["tool_call_id"]]
        if same:
            own[next((n for n in same if not own[n]), same[-1])].append(result)
        else:
            unnamed.append(result)
    for result in unnamed:
        own[next((n for n, one in enumerate(own) if not one), -1)].append(result)
    found: list[dict[str, Any]] = []
    told = iter(own)
    for message in calling:
        thought = "\n\n".join(filter(None, (_unmarked(message), message["content"])))
        for call in message["tool_calls"]:
            made = {"role": "assistant", "content": "", "tool_calls": [call]}
            found += [made | ({"thinking": thought} if thought else {}), *next(told)]
            thought = ""
    return found


def _thinking(message: dict[str, Any]) -> dict[str, Any]:
    others = {key: value for key, value in message.items() if key != "reasoning_content"}
    thought = _unmarked(message)
    return others | ({"thinking": thought} if thought else {})


def _unmarked(message: dict[str, Any]) -> str:
    """What is thought in a message, without marks, which the template refuses."""
    return _MARK.sub("", message.get("reasoning_content", ""))


def described(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools of which the template can tell: it wants a description of each, be it empty."""
    return [tool | {"function": {"description": "", **tool["function"]}} for tool in tools]
