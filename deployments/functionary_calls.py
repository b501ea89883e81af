"""Calls of tools as Functionary writes them from version 3.1 on Llama 3.1."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deployments.headed_calls import HeadedCalls
from deployments.tool_calls import FUNCTION_NAME, json_text


class FunctionaryCalls(HeadedCalls):
    """`<function=name>{...}</function>` in a text, one behind the other where there are several."""

    CALL, CALL_END = "<function=", "</function>"
    HEAD = re.compile(rf"({FUNCTION_NAME})>\s*")
    markers: tuple[str, ...] = (CALL, CALL_END)


def written_functionary_call(name: str, arguments: Mapping[str, Any] | str) -> str:
    """A call; arguments that are no object stand as they are."""
    written = arguments if isinstance(arguments, str) else json_text(arguments)
    return f"{FunctionaryCalls.CALL}{name}>{written}{FunctionaryCalls.CALL_END}"
