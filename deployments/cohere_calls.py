"""Calls of tools as Cohere's models write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from deployments.marked_calls import MarkedCalls
from deployments.tool_calls import json_text


class CohereCalls(MarkedCalls):
    """`<|START_ACTION|>[{"tool_call_id": ..., "tool_name": ..., "parameters": {...}}]<|END_ACTION|>`.

    So write Command R7B, Command A and their successors. The ids are numbers that their templates count anew
    with each prompt, so that calls are told with ids that no two of a conversation share.
    """

    OPEN, CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
    NAME_KEY: ClassVar[Literal["name", "tool_name"]] = "tool_name"
    markers: tuple[str, ...] = (OPEN, CLOSE)


def written_cohere_call(name: str, arguments: Mapping[str, Any] | str) -> str:
    """A call in a list of its own; arguments that are no object stand as they are."""
    written = arguments if isinstance(arguments, str) else json_text(arguments)
    call = f'{{"tool_call_id": "0", "tool_name": {json.dumps(name)}, "parameters": {written}}}'
    return f"{CohereCalls.OPEN}[\n    {call}\n]{CohereCalls.CLOSE}"
