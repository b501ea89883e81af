"""Conversations as the chat templates of models with channels read them, that is gpt-oss's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def in_channels(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a conversation such that the template leaves nothing out.

    It tells what a system says at the beginning only, and of a message one call, whose function's every
    result behind it is taken to be. What is thought before a call is `thinking`; what is said there, which
    it would put into the same place, cannot stand beside it.

    Args:
        messages: as other chat templates expect them.
    """
    said = [message["content"] for message in messages if message["role"] == "system"]
    found: list[dict[str, Any]] = [{"role": "system", "content": "\n\n".join(said)}] if said else []
    others = [message for message in messages if message["role"] != "system"]
    while others:
        message = others.pop(0)
        if not message.get("tool_calls"):
            found.append(_thinking(message))
            continue
        num_results = next((n for n, other in enumerate(others) if other["role"] != "tool"), len(others))
        found += _one_by_one(message, others[:num_results])
        del others[:num_results]
    return found


def _one_by_one(message: dict[str, Any], results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each of a message's calls by itself, with the results of it, and at last those that name none."""
    calls = message["tool_calls"]
    found: list[dict[str, Any]] = []
    for number, call in enumerate(calls):
        thought = [message.get("reasoning_content"), message["content"]] if number == 0 else []
        found.append({"role": "assistant", "content": "", "tool_calls": [call]})
        if any(thought):
            found[-1]["thinking"] = "\n\n".join(filter(None, thought))
        found += [result for result in results if result["tool_call_id"] == call["id"]]
    named = {call["id"] for call in calls}
    return found + [result for result in results if result["tool_call_id"] not in named]


def _thinking(message: dict[str, Any]) -> dict[str, Any]:
    others = {key: value for key, value in message.items() if key != "reasoning_content"}
    return others | ({"thinking": message["reasoning_content"]} if "reasoning_content" in message else {})


def described(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools of which the template can tell: it wants a description of each, be it empty."""
    return [tool | {"function": {"description": "", **tool["function"]}} for tool in tools]
