"""Calls of tools as DeepSeek's models write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from deployments.headed_calls import HeadedCalls
from deployments.tool_calls import FUNCTION_NAME, json_text


class DeepseekCalls(HeadedCalls):
    """Calls between tokens of their own, in either form that DeepSeek's models have.

    In V3 and R1 `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, and behind it the arguments in a
    block of "```json"; from V3.1 on `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}`. Both end with
    `<｜tool▁call▁end｜>`.
    """

    OPEN, CLOSE = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
    CALL, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
    SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
    HEAD = re.compile(
        rf"\s*(?:\w+{SEPARATOR}\s*({FUNCTION_NAME})\s*```(?:json)?|({FUNCTION_NAME})\s*{SEPARATOR})\s*"
    )
    markers: tuple[str, ...] = (OPEN, CLOSE, CALL, CALL_END, SEPARATOR)


def written_deepseek_call(name: str, arguments: Mapping[str, Any] | str) -> str:
    """A call as V3 and R1 write it; arguments that are no object stand as they are."""
    form = DeepseekCalls
    written = arguments if isinstance(arguments, str) else json_text(arguments)
    call = f"{form.CALL}function{form.SEPARATOR}{name}\n```json\n{written}\n```{form.CALL_END}"
    return f"{form.OPEN}{call}{form.CLOSE}"
