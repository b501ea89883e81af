"""Calls of tools as Kimi K2 writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deployments.headed_calls import HeadedCalls
from deployments.tool_calls import FUNCTION_NAME, NewId, json_text


class KimiCalls(HeadedCalls):
    """Calls between tokens of their own, each with its id, `functions.name:0`, which names the function.

    The model counts the calls of a conversation. Clients are told the ids as it wrote them, for its template
    shows it what calls brought under these.
    """

    OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
    SEPARATOR = "<|tool_call_argument_begin|>"
    HEAD = re.compile(rf"\s*(?:functions\.)?({FUNCTION_NAME}):[0-9]{{1,6}}\s*{re.escape(SEPARATOR)}\s*")
    markers: tuple[str, ...] = (OPEN, CLOSE, CALL, CALL_END, SEPARATOR)

    def _call_id(self, head: str) -> str:
        return head.partition(self.SEPARATOR)[0].strip()


def kimi_ids(num_earlier: int) -> NewId:
    """How ids are made for calls that the model did not number, after so many in the conversation."""
    return lambda name, number: f"functions.{name}:{num_earlier + number}"


def written_kimi_call(name: str, arguments: Mapping[str, Any] | str) -> str:
    """A call by itself; arguments that are no object stand as they are."""
    form = KimiCalls
    written = arguments if isinstance(arguments, str) else json_text(arguments)
    call = f"{form.CALL}functions.{name}:0{form.SEPARATOR}{written}{form.CALL_END}"
    return f"{form.OPEN}{call}{form.CLOSE}"
