"""Answers of `/v1/responses`, whole and as its sequence of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from deployments.answering import Call, translated
from deployments.choice_state import ChoiceState
from deployments.errors import ApiError
from deployments.generation import Update
from deployments.openai_responses import token_logprobs
from deployments.responses_schema import ResponsesRequest, renamed
from deployments.single_tokens import divided
from deployments.text_logprobs import TextLogprobs
from deployments.tool_calls import CallDelta


@dataclass
class _Item:
    """One entry of a response's output as it grows: a message, a call if `name` is set, or a thought."""

    item_id: str
    text: str = ""
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    is_thought: bool = False
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def shown(self, status: str = "completed") -> dict[str, Any]:
        """As clients see it."""
        if self.name:
            return {
                "type": "function_call",
                "id": self.item_id,
                "call_id": self.call_id,
                "name": self.name,
                "arguments": self.text,
                "status": status,
                **({} if self.namespace is None else {"namespace": self.namespace}),
            }
        if self.is_thought:
            content = [self.part()] if status != "in_progress" else []
            shown = {"type": "reasoning", "id": self.item_id, "summary": [], "content": content}
            return shown | {"status": status}
        return {
            "type": "message",
            "id": self.item_id,
            "role": "assistant",
            "status": status,
            "content": [self.part()] if status != "in_progress" else [],
        }

    def part(self) -> dict[str, Any]:
        """The text of a message or a thought."""
        if self.is_thought:
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}


class ResponsesView:
    """Shows one call as a response.

    Args:
        request: what was asked, parts of which a response repeats.
    """

    def __init__(self, request: ResponsesRequest) -> None:
        self._request = request
        self._functions = {function.full_name: function for function in request.functions}
        self._items: list[_Item] = []
        self._sequence = 0
        self._logprobs = TextLogprobs()

    async def answer(self, call: Call) -> bytes:
        """Run a request to its end; the response's body. Raises `ApiError` in this API's names."""
        try:
            async with aclosing(translated(call)) as updates:
                async for update in updates:
                    for _ in self._take(call, update):
                        pass
        except ApiError as error:
            raise renamed(error) from None
        return msgspec.json.encode(self._finished(call))

    async def stream(self, call: Call) -> AsyncGenerator[bytes, None]:
        """Run a request; its events. Raises `ApiError`, once there were any with the one that tells it."""
        started = False
        try:
            async with aclosing(translated(call)) as updates:
                async for update in updates:
                    if not started:
                        started = True
                        response = self._response(call, "in_progress")
                        yield self._event("response.created", response=response)
                        yield self._event("response.in_progress", response=response)
                    for event in self._take(call, update):
                        yield event
            final = self._finished(call)
            yield self._event(f"response.{final['status']}", response=final)
        except ApiError as error:
            error = renamed(error)
            if started:
                failed = self._response(call, "failed")
                failed["error"] = {"code": error.code or "server_error", "message": error.message}
                error.event = self._event("response.failed", response=failed)
            raise error from None

    # -- parts -----------------------------------------------------------------------------------------

    def _take(self, call: Call, update: Update) -> Iterator[bytes]:
        """The events of one update; `_items` grows."""
        if not self._request.wants_logprobs:
            yield from self._take_one(call, update)
            return
        for part in divided(update):  # else it depended on the lengths of steps which tokens are of the text
            entries = token_logprobs(call.shape.envelope, part.tokens, part.logprobs)
            self._logprobs.add(part.text, entries)
            yield from self._take_one(call, part)

    def _take_one(self, call: Call, update: Update) -> Iterator[bytes]:
        state = call.states[0]
        state.tokens += update.tokens
        ends = update.finish_reason is not None
        parsed = state.parse(update.text, update.tokens, ends=ends)
        if parsed.reasoning:
            yield from self._take_thought(call, parsed.reasoning)
        for part in parsed.parts:
            take = self._take_text(call, part) if isinstance(part, str) else self._take_call(call, part)
            yield from take
        if ends:
            state.finish_reason = update.finish_reason
            has_text = state.parser is None or state.parser.has_text
            if not self._items and has_text:  # an answer without any text is still a message
                yield from self._open(_Item(self._new_id(call, "msg")))
            last = self._items[-1] if self._items else None
            if last is not None and not last.name:  # tokens that show nothing belong to the text before
                last.logprobs += self._logprobs.rest()
            yield from self._close(state)

    def _take_thought(self, call: Call, text: str) -> Iterator[bytes]:
        if not self._items:
            yield from self._open(_Item(self._new_id(call, "rs"), is_thought=True))
        self._logprobs.of(text)  # those of thoughts are not told
        item = self._items[-1]
        item.text += text
        yield self._event("response.reasoning_text.delta", **self._place(item), delta=text)

    def _take_text(self, call: Call, text: str) -> Iterator[bytes]:
        if not self._items or self._items[-1].name or self._items[-1].is_thought:
            yield from self._close(call.states[0])
            yield from self._open(_Item(self._new_id(call, "msg")))
        item, logprobs = self._items[-1], self._logprobs.of(text)
        item.text += text
        item.logprobs += logprobs
        yield self._event("response.output_text.delta", **self._place(item), delta=text, logprobs=logprobs)

    def _take_call(self, call: Call, delta: CallDelta) -> Iterator[bytes]:
        self._logprobs.told_call()
        if delta.call_id:
            yield from self._close(call.states[0])
            called = self._functions[delta.name]
            item = _Item(
                self._new_id(call, "fc"),
                call_id=delta.call_id,
                name=called.function.name,
                namespace=called.namespace,
            )
            yield from self._open(item)
        item = self._items[-1]
        item.text += delta.arguments
        if delta.arguments:
            yield self._event(
                "response.function_call_arguments.delta",
                item_id=item.item_id,
                output_index=len(self._items) - 1,
                delta=delta.arguments,
            )

    def _open(self, item: _Item) -> Iterator[bytes]:
        self._items.append(item)
        at = len(self._items) - 1
        yield self._event("response.output_item.added", output_index=at, item=item.shown("in_progress"))
        if not item.name:
            empty = _Item("", is_thought=item.is_thought).part()
            yield self._event("response.content_part.added", **self._place(item), part=empty)

    def _close(self, state: ChoiceState) -> Iterator[bytes]:
        """End the last item, if there is one."""
        if not self._items:
            return
        item, at = self._items[-1], len(self._items) - 1
        if item.name:
            yield self._event(
                "response.function_call_arguments.done",
                item_id=item.item_id,
                output_index=at,
                name=item.name,
                arguments=item.text,
            )
        else:
            place = self._place(item)
            if item.is_thought:
                yield self._event("response.reasoning_text.done", **place, text=item.text)
            else:
                told = {"text": item.text, "logprobs": item.logprobs}
                yield self._event("response.output_text.done", **place, **told)
            yield self._event("response.content_part.done", **place, part=item.part())
        status = "incomplete" if state.finish_reason == "length" else "completed"
        yield self._event("response.output_item.done", output_index=at, item=item.shown(status))

    def _place(self, item: _Item) -> dict[str, Any]:
        return {"item_id": item.item_id, "output_index": len(self._items) - 1, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return f"event: {kind}\ndata: ".encode() + msgspec.json.encode(body) + b"\n\n"

    def _new_id(self, call: Call, kind: str) -> str:
        return f"{kind}_{self._id(call)}_{len(self._items)}"

    @staticmethod
    def _id(call: Call) -> str:
        return call.shape.envelope.response_id.removeprefix("chatcmpl-")

    def _finished(self, call: Call) -> dict[str, Any]:
        is_cut = call.states[0].finish_reason == "length"
        response = self._response(call, "incomplete" if is_cut else "completed")
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        counts: dict[str, Any] = {}
        call.add_usage(counts)
        usage = counts["usage"]
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            # What is written into the cache costs nothing here; OpenAI's client reads both.
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
            "total_tokens": usage["total_tokens"],
        }
        call.add_metrics(response)
        response["service_tier"] = response["metrics"]["tier"]["served"]
        return response

    def _response(self, call: Call, status: str) -> dict[str, Any]:
        request, served, envelope = self._request, call.request, call.shape.envelope
        done = "incomplete" if status in ("incomplete", "failed") else "completed"
        text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {}
        return {
            "id": f"resp_{self._id(call)}",
            "object": "response",
            "created_at": envelope.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": envelope.model,
            "output": [item.shown(done if item is self._items[-1] else "completed") for item in self._items],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
            "background": False,
            "store": False,
            "temperature": 1.0 if served.temperature is None else served.temperature,
            "top_p": 1.0 if served.top_p is None else served.top_p,
            "top_logprobs": request.top_logprobs or 0,
            "text": {"format": {"type": "text"}} | text,
            "tool_choice": request.tool_choice or "auto",
            "tools": [tool.model_dump(exclude_none=True) for tool in request.heard],
            "truncation": request.truncation or "disabled",
            "service_tier": None,  # a lower one than asked for may serve: the receipt says
            "usage": None,
            "user": request.user,
            "metadata": request.metadata or {},
        }
