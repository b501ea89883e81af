"""From the updates of a request's choices to its response, whole or as server-sent events."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from cluster.stream_messages import Terms
from deployments.cell_client import CellLost, RequestRejected
from deployments.choice_state import ChoiceState
from deployments.errors import ApiError, from_rejection, internal, not_ready
from deployments.generation import Update
from deployments.openai_responses import ChatFormat, CompletionFormat
from deployments.openai_schema import GenerationRequest
from deployments.prompt_preparation import in_thread_if
from deployments.receipts import ChoiceOutcome, metrics, usage
from deployments.request_log import observed

_log = logging.getLogger(__name__)

#: More log-probabilities than this are written in a thread: those of a long prompt, with their alternatives,
#: take seconds, in which all other streams would stand still.
INLINE_LOGPROBS = 512


@dataclass
class Call:
    """A checked request on its way.

    Attributes:
        updates: of all its choices, as they come.
        states: one per choice.
        shape: how it is shown.
        terms: what it asked for. seed: its random number seed. num_prompts: how many prompts it has.
        prompt_field: the field that holds the prompt, for errors.
        includes_usage: whether a stream ends with a usage chunk.
        counts_tokens: whether every chunk tells the token counts so far.
        shows_all: whether a chunk is due also for tokens whose text is still held back.
        request_id: how the client and the log call it.
        request: what is asked, with the model's own defaults.
        outcomes: of the choices that have finished.
        num_streamed: output tokens so far, of a stream.
        num_kept: choices returned for each prompt, the likeliest of those generated; None for all.
        num_rejected: choices answered with a refusal, by code and tier; these too if no cell takes them.
    """

    updates: AsyncGenerator[Update, None]
    states: list[ChoiceState]
    shape: CompletionFormat | ChatFormat
    terms: Terms
    seed: int
    num_prompts: int
    prompt_field: str
    includes_usage: bool
    counts_tokens: bool
    shows_all: bool
    request_id: str
    request: GenerationRequest
    outcomes: dict[int, ChoiceOutcome] = field(default_factory=dict)
    num_streamed: int = 0
    num_kept: int | None = None
    num_rejected: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def is_finished(self) -> bool:
        """Whether every choice has."""
        return len(self.outcomes) == len(self.states)

    @property
    def takes_long(self) -> bool:
        """Whether writing the whole answer does."""
        return sum(len(one.prompt_logprobs) + len(one.logprobs) for one in self.states) > INLINE_LOGPROBS

    def kept(self) -> list[ChoiceState]:
        """The choices returned: of each prompt, those with the most probable tokens on average."""
        if self.num_kept is None:
            return self.states
        made = len(self.states) // self.num_prompts
        groups = [self.states[first : first + made] for first in range(0, len(self.states), made)]
        best = [
            sorted(group, key=lambda state: state.mean_logprob, reverse=True)[: self.num_kept]
            for group in groups
        ]
        return [state for group in best for state in group]

    def add_usage(self, body: dict[str, Any]) -> None:
        """Put the token counts into a response or chunk."""
        thoughts = [state.reasoning.num_tokens for state in self.states if state.reasoning is not None]
        num_reasoning = sum(thoughts) if thoughts else None
        body["usage"] = usage(self._ordered(), self.num_prompts, num_reasoning=num_reasoning)

    def add_metrics(self, body: dict[str, Any]) -> None:
        """Put the receipt into a response or chunk, and for who named a service tier the one that served."""
        body["metrics"] = self.receipt()
        if self.shape.envelope.shows_tier:
            body["service_tier"] = body["metrics"]["tier"]["served"]

    def receipt(self) -> dict[str, Any]:
        """What the finished choices attained."""
        return metrics(self._ordered(), self.terms.objective, self.seed, self.terms.tier)

    def usage_so_far(self) -> dict[str, Any]:
        """Token counts in the middle of a stream."""
        prompt = sum(len(state.prompt) for state in self.states[:: len(self.states) // self.num_prompts])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.num_streamed,
            "total_tokens": prompt + self.num_streamed,
        }

    def _ordered(self) -> list[ChoiceOutcome]:
        return [self.outcomes[index] for index in sorted(self.outcomes)]


async def answer(call: Call) -> bytes:
    """Run a request to its end; the response's body."""
    async with aclosing(translated(call)) as updates:
        async for update in updates:
            call.states[update.choice].add(update)
    return await in_thread_if(call.takes_long, partial(_whole, call))


def _whole(call: Call) -> bytes:
    body = call.shape.whole(call.kept())
    call.add_usage(body)
    call.add_metrics(body)
    return msgspec.json.encode(body)


async def stream(call: Call) -> AsyncGenerator[bytes, None]:
    """Run a request; its server-sent events. Raises `ApiError`, also in their midst.

    Then [DONE] does not come: its absence tells clients that do not know error events that something broke.
    """
    async with aclosing(translated(call)) as updates:
        async for update in updates:
            is_long = len(update.prompt_logprobs) > INLINE_LOGPROBS
            events = await in_thread_if(is_long, partial(_events, call, update))
            if events:
                yield events
    if call.includes_usage:
        closing = call.shape.closing()
        call.add_usage(closing)
        call.add_metrics(closing)
        yield _event(closing)
    yield b"data: [DONE]\n\n"


def _events(call: Call, update: Update) -> bytes:
    """What one update adds to the stream; nothing while its text is held back."""
    state = call.states[update.choice]
    events = b""
    if isinstance(call.shape, ChatFormat) and not state.started:
        opening = call.shape.role_chunk(update.choice, state)
        if call.includes_usage:
            opening["usage"] = call.usage_so_far() if call.counts_tokens else None
        events = _event(opening)
    call.num_streamed += len(update.tokens)
    if update.text or update.finish_reason is not None or call.shows_all:
        chunk = call.shape.chunk(update, state)
        if chunk is None:
            return events
        if update.step is not None:
            codec = call.shape.envelope.codec
            chunk["flotilla"] = update.step.body(update.tokens, update.logprobs, codec)
        if call.includes_usage:
            chunk["usage"] = call.usage_so_far() if call.counts_tokens else None
        elif call.is_finished:
            call.add_metrics(chunk)
        events += _event(chunk)
    elif state.reasoning is not None:
        state.reasoning.feed("", update.tokens)  # those of a thought count, whether they show text or not
    return events


async def translated(call: Call) -> AsyncGenerator[Update, None]:
    """The call's updates, with every failure as an `ApiError`."""
    with observed(call) as request:
        try:
            async with aclosing(call.updates) as updates:
                async for update in updates:
                    if update.outcome is not None:
                        call.outcomes[update.choice] = update.outcome
                        request.finish_reasons[update.choice] = update.finish_reason or ""
                    yield update
        except RequestRejected as error:
            # Not where cells are asked: how many they refuse until the others are given up is chance.
            call.num_rejected[error.rejected.code, call.terms.tier] += len(call.states)
            raise from_rejection(error.rejected, call.prompt_field) from error
        except CellLost as error:
            raise not_ready(f"The model was lost while it worked on this request ({error}).") from error
        except ApiError:
            raise
        except Exception as error:
            _log.exception("request %s failed", call.request_id)
            raise internal(call.request_id) from error


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
