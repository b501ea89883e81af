"""Bodies of the OpenAI-compatible responses, whole and as stream chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deployments.generation import Update
from deployments.text_codec import TextCodec
from verifier.messages import TokenLogprobs

#: OpenAI's stand-in for minus infinity, which JSON cannot hold.
_LEAST_LOGPROB = -9999.0


@dataclass
class ChoiceState:
    """A choice as it grows.

    Attributes:
        prompt: its prompt's tokens. echo: its prompt's text, if asked for in front of the answer.
        text, tokens, logprobs, finish_reason, stop_reason: what arrived so far; a stream keeps only what
            the next chunk depends on.
        text_offset: characters before the next token, as completions' log-probabilities count them.
    """

    prompt: list[int]
    echo: str = ""
    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    started: bool = False
    text_offset: int = 0

    def add(self, update: Update) -> None:
        """Append an update, for a whole response."""
        self.text.append(update.text)
        self.tokens += update.tokens
        self.logprobs += update.logprobs
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason


@dataclass(frozen=True)
class Envelope:
    """Fields that all chunks of a response share."""

    response_id: str
    model: str
    codec: TextCodec
    service_tier: str | None = None
    with_token_ids: bool = False
    num_logprobs: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A response or chunk around its choices."""
        body: dict[str, Any] = {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if self.service_tier is not None:
            body["service_tier"] = self.service_tier
        return body


class ResponseFormat(Protocol):
    """How one endpoint shows choices."""

    def chunk(self, update: Update, state: ChoiceState) -> dict[str, Any]:
        """A stream chunk with one update."""
        ...

    def whole(self, states: Sequence[ChoiceState]) -> dict[str, Any]:
        """The response without streaming."""
        ...

    def closing(self) -> dict[str, Any]:
        """A chunk without choices, for the usage."""
        ...


class CompletionFormat:
    """`/v1/completions`."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope

    def chunk(self, update: Update, state: ChoiceState) -> dict[str, Any]:
        """See `ResponseFormat`."""
        first = not state.started
        state.started = True
        text = state.echo + update.text if first else update.text
        choice = self._choice(
            update.choice,
            text,
            update.tokens,
            update.logprobs,
            update.finish_reason,
            update.stop_reason,
            state,
        )
        if self._envelope.with_token_ids and first:
            choice["prompt_token_ids"] = state.prompt
        return self._envelope.wrap("text_completion", [choice])

    def whole(self, states: Sequence[ChoiceState]) -> dict[str, Any]:
        """See `ResponseFormat`."""
        choices = []
        for index, state in enumerate(states):
            text = state.echo + "".join(state.text)
            choice = self._choice(
                index, text, state.tokens, state.logprobs, state.finish_reason, state.stop_reason, state
            )
            if self._envelope.with_token_ids:
                choice["prompt_token_ids"] = state.prompt
            choices.append(choice)
        return self._envelope.wrap("text_completion", choices)

    def closing(self) -> dict[str, Any]:
        """See `ResponseFormat`."""
        return self._envelope.wrap("text_completion", [])

    def _choice(
        self,
        index: int,
        text: str,
        tokens: list[int],
        logprobs: list[TokenLogprobs],
        finish_reason: str | None,
        stop_reason: str | int | None,
        state: ChoiceState,
    ) -> dict[str, Any]:
        shown = self._logprobs(tokens, logprobs, state) if self._envelope.num_logprobs is not None else None
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": shown,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
        if self._envelope.with_token_ids:
            choice["token_ids"] = tokens
        return choice

    def _logprobs(
        self, tokens: list[int], logprobs: list[TokenLogprobs], state: ChoiceState
    ) -> dict[str, Any]:
        token_text = self._envelope.codec.token_text
        names, offsets = [token_text(token) for token in tokens], []
        for name in names:
            offsets.append(state.text_offset)
            state.text_offset += len(name)
        alternatives = []
        for name, entry in zip(names, logprobs, strict=False):
            top = {token_text(token): _finite(value) for token, value in _top(entry)}
            # OpenAI always lists the token chosen, which sampling may have taken from further down.
            top.setdefault(name, _finite(entry.logprob))
            alternatives.append(top)
        return {
            "tokens": names,
            "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
            "top_logprobs": alternatives if self._envelope.num_logprobs else None,
            "text_offset": offsets,
        }


class ChatFormat:
    """`/v1/chat/completions`."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope

    def chunk(self, update: Update, state: ChoiceState) -> dict[str, Any]:
        """See `ResponseFormat`. The role is sent by `role_chunk`."""
        choice: dict[str, Any] = {
            "index": update.choice,
            "delta": {"content": update.text} if update.text or update.finish_reason is None else {},
            "logprobs": self._logprobs(update.tokens, update.logprobs),
            "finish_reason": update.finish_reason,
        }
        if update.finish_reason is not None:
            choice["stop_reason"] = update.stop_reason
        if self._envelope.with_token_ids:
            choice["token_ids"] = update.tokens
        return self._envelope.wrap("chat.completion.chunk", [choice])

    def role_chunk(self, index: int, state: ChoiceState) -> dict[str, Any]:
        """The first chunk of a choice."""
        state.started = True
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        body = self._envelope.wrap("chat.completion.chunk", [choice])
        if self._envelope.with_token_ids:
            body["prompt_token_ids"] = state.prompt
        return body

    def whole(self, states: Sequence[ChoiceState]) -> dict[str, Any]:
        """See `ResponseFormat`."""
        choices = []
        for index, state in enumerate(states):
            choice: dict[str, Any] = {
                "index": index,
                "message": {"role": "assistant", "content": "".join(state.text), "refusal": None},
                "logprobs": self._logprobs(state.tokens, state.logprobs),
                "finish_reason": state.finish_reason,
                "stop_reason": state.stop_reason,
            }
            if self._envelope.with_token_ids:
                choice["token_ids"] = state.tokens
            choices.append(choice)
        body = self._envelope.wrap("chat.completion", choices)
        if self._envelope.with_token_ids:
            body["prompt_token_ids"] = states[0].prompt
        return body

    def closing(self) -> dict[str, Any]:
        """See `ResponseFormat`."""
        return self._envelope.wrap("chat.completion.chunk", [])

    def _logprobs(self, tokens: list[int], logprobs: list[TokenLogprobs]) -> dict[str, Any] | None:
        if self._envelope.num_logprobs is None:
            return None
        content = []
        for token, entry in zip(tokens, logprobs, strict=False):
            item = self._token(token, entry.logprob)
            item["top_logprobs"] = [self._token(other, value) for other, value in _top(entry)]
            content.append(item)
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        codec = self._envelope.codec
        return {
            "token": codec.token_text(token),
            "logprob": _finite(logprob),
            "bytes": list(codec.token_bytes(token)),
        }


def _top(entry: TokenLogprobs) -> list[tuple[int, float]]:
    return list(zip(entry.top_ids, entry.top_logprobs, strict=True))


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
