"""Answers of `/v1/messages`, whole and as its sequence of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from deployments.answering import Call, translated
from deployments.choice_state import ChoiceState
from deployments.errors import ApiError
from deployments.generation import Update
from deployments.messages_blocks import INVALID_JSON
from deployments.messages_schema import renamed
from deployments.tool_calls import DECODER, CallDelta

#: Of thoughts, where Anthropic's API has a proof that they are its own. There has to be one: clients leave a
#: thought without it out of the conversation that they send back, or send it as text.
_SIGNATURE = "unsigned"


@dataclass
class _Block:
    """One block of an answer as it grows: text, a thought, or a call with its arguments as `text`."""

    kind: Literal["text", "thinking", "tool_use"] = "text"
    text: str = ""
    call_id: str = ""
    name: str = ""

    def shown(self) -> dict[str, Any]:
        """As clients see it when it is complete."""
        match self.kind:
            case "text":
                return {"type": "text", "text": self.text}
            case "thinking":
                return {"type": "thinking", "thinking": self.text, "signature": _SIGNATURE}
            case "tool_use":
                shown = {"type": "tool_use", "id": self.call_id, "name": self.name}
                return shown | {"input": _input(self.text)}

    def begun(self) -> dict[str, Any]:
        """As clients see it when it begins."""
        shown = _Block(self.kind, call_id=self.call_id, name=self.name).shown()
        return shown | {"signature": ""} if self.kind == "thinking" else shown

    def delta(self, text: str) -> dict[str, Any]:
        """More of it."""
        match self.kind:
            case "text":
                return {"type": "text_delta", "text": text}
            case "thinking":
                return {"type": "thinking_delta", "thinking": text}
            case "tool_use":
                return {"type": "input_json_delta", "partial_json": text}


class MessagesView:
    """Shows one call as a message."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._stop_reason: str | int | None = None

    async def answer(self, call: Call) -> bytes:
        """Run a request to its end; the message. Raises `ApiError` in this API's names."""
        try:
            async with aclosing(translated(call)) as updates:
                async for update in updates:
                    for _ in self._take(call, update):
                        pass
        except ApiError as error:
            raise renamed(error) from None
        message = self._message(call) | self._end(call.states[0])
        message["content"] = [block.shown() for block in self._blocks]
        message["usage"] = _usage(call)
        call.add_metrics(message)
        return msgspec.json.encode(message)

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """Run a request; its events. Raises `ApiError`, also in their midst."""
        started = False
        try:
            async with aclosing(translated(call)) as updates:
                async for update in updates:
                    if not started:
                        started = True
                        yield _event("message_start", message=self._message(call))
                    for event in self._take(call, update):
                        yield event
        except ApiError as error:
            raise renamed(error) from None
        told: dict[str, Any] = {"delta": self._end(call.states[0]), "usage": _usage(call)}
        call.add_metrics(told)
        yield _event("message_delta", **told)
        yield _event("message_stop")

    # -- parts -----------------------------------------------------------------------------------------

    def _take(self, call: Call, update: Update) -> Iterator[bytes]:
        """The events of one update; `_blocks` grow."""
        state = call.states[0]
        state.tokens += update.tokens
        ends = update.finish_reason is not None
        parsed = state.parse(update.text, update.tokens, ends=ends)
        if parsed.reasoning:
            yield from self._add(parsed.reasoning, _Block("thinking"))
        for part in parsed.parts:
            if not isinstance(part, str):
                yield from self._take_call(part)
            elif part:
                yield from self._add(part, _Block())
        if ends:
            state.finish_reason, self._stop_reason = update.finish_reason, update.stop_reason
            if not any(block.kind != "thinking" for block in self._blocks):  # clients read a text
                yield from self._close()
                yield from self._open(_Block())
            yield from self._close()

    def _take_call(self, delta: CallDelta) -> Iterator[bytes]:
        if delta.call_id:
            yield from self._close()
            yield from self._open(_Block("tool_use", call_id=delta.call_id, name=delta.name))
        if delta.arguments:
            yield from self._add(delta.arguments, self._blocks[-1])

    def _add(self, text: str, block: _Block) -> Iterator[bytes]:
        """More text of the last block, or a first text of a new one where that is of another kind."""
        if not self._blocks or self._blocks[-1].kind != block.kind:
            yield from self._close()
            yield from self._open(block)
        last = self._blocks[-1]
        last.text += text
        yield _event("content_block_delta", index=len(self._blocks) - 1, delta=last.delta(text))

    def _open(self, block: _Block) -> Iterator[bytes]:
        self._blocks.append(block)
        yield _event("content_block_start", index=len(self._blocks) - 1, content_block=block.begun())

    def _close(self) -> Iterator[bytes]:
        if self._blocks:
            at = len(self._blocks) - 1
            if self._blocks[-1].kind == "thinking":
                delta = {"type": "signature_delta", "signature": _SIGNATURE}
                yield _event("content_block_delta", index=at, delta=delta)
            yield _event("content_block_stop", index=at)

    def _message(self, call: Call) -> dict[str, Any]:
        """As it begins."""
        envelope = call.shape.envelope
        return {
            "id": f"msg_{envelope.response_id.removeprefix('chatcmpl-')}",
            "type": "message",
            "role": "assistant",
            "model": envelope.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _counts(len(call.states[0].prompt), 0, 0),
        }

    def _end(self, state: ChoiceState) -> dict[str, Any]:
        """Why it ended."""
        if isinstance(self._stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self._stop_reason}
        if state.finish_reason == "length":
            reason = "max_tokens"
        elif any(block.kind == "tool_use" for block in self._blocks):
            reason = "tool_use"
        else:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}


def _input(arguments: str) -> msgspec.Raw | dict[str, Any]:
    """The arguments of a call as the object that this API shows; text that is none is wrapped in one.

    As it is written, which is what a stream tells: not all of JSON can be read and said again, as half of a
    surrogate pair or a number beyond all doubles.
    """
    if not arguments.strip():
        return {}
    try:
        value = DECODER.decode(arguments)
    except (ValueError, RecursionError):
        value = None
    return msgspec.Raw(arguments.encode()) if isinstance(value, dict) else {INVALID_JSON: arguments}


def _usage(call: Call) -> dict[str, Any]:
    counts: dict[str, Any] = {}
    call.add_usage(counts)
    usage = counts["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    told: dict[str, Any] = _counts(usage["prompt_tokens"], cached, usage["completion_tokens"])
    if (details := usage.get("completion_tokens_details")) is not None:
        told["output_tokens_details"] = {"thinking_tokens": details["reasoning_tokens"]}
    return told


def _counts(prompt: int, cached: int, output: int) -> dict[str, int]:
    """Tokens as this API counts them: those of the prompt that were shared stand apart."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode({"type": kind, **fields}) + b"\n\n"
