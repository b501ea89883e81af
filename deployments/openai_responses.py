"""Bodies of the OpenAI-compatible responses, whole and as stream chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deployments.choice_state import ChoiceState
from deployments.generation import Update
from deployments.text_codec import TextCodec
from deployments.text_offsets import echo_offsets
from deployments.tool_calls import CallDelta
from verifier.messages import TokenLogprobs

#: OpenAI's stand-in for minus infinity, which JSON cannot hold.
_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True)
class Envelope:
    """Fields that all chunks of a response share, and how they show tokens.

    Attributes:
        shows_tier: whether the service tier is told, once it is known.
        fingerprint: OpenAI's `system_fingerprint`: what text depends on besides the request.
    """

    response_id: str
    model: str
    codec: TextCodec
    fingerprint: str | None = None
    shows_tier: bool = False
    with_token_ids: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    tokens_as_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def token_name(self, token: int) -> str:
        """A token as log-probabilities show it."""
        return f"token_id:{token}" if self.tokens_as_ids else self.codec.token_text(token)

    def prompt_logprobs(self, state: ChoiceState) -> list[dict[str, Any] | None]:
        """vLLM's: per prompt token its own and the likeliest ones by id; nothing for the first."""
        shown: list[dict[str, Any] | None] = [None]
        for token, entry in zip(state.prompt[1:], state.prompt_logprobs, strict=False):
            top = _top(entry, self.num_prompt_logprobs)
            ranked = {other: (value, rank) for rank, (other, value) in enumerate(top, start=1)}
            listed = {token: ranked.get(token, (entry.logprob, entry.rank or None)), **ranked}
            shown.append(
                {
                    str(other): {
                        "logprob": _finite(value),
                        "rank": rank,
                        "decoded_token": self.codec.token_text(other),
                    }
                    for other, (value, rank) in listed.items()
                }
            )
        return shown

    def wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A response or chunk around its choices."""
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


class ResponseFormat(Protocol):
    """How one endpoint shows choices.

    Attributes:
        envelope: what all chunks share.
    """

    envelope: Envelope

    def chunk(self, update: Update, state: ChoiceState) -> dict[str, Any] | None:
        """A stream chunk with one update; None if it shows nothing."""
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
        self.envelope = envelope

    def chunk(self, update: Update, state: ChoiceState) -> dict[str, Any]:
        """See `ResponseFormat`."""
        first = not state.started
        state.started = True
        state.prompt_logprobs = update.prompt_logprobs
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
        if self.envelope.with_token_ids and first:
            choice["prompt_token_ids"] = state.prompt
        return self.envelope.wrap("text_completion", [choice])

    def whole(self, states: Sequence[ChoiceState]) -> dict[str, Any]:
        """See `ResponseFormat`."""
        choices = []
        for index, state in enumerate(states):
            text = state.echo + state.text
            choice = self._choice(
                index, text, state.tokens, state.logprobs, state.finish_reason, state.stop_reason, state
            )
            if (shown := choice["logprobs"]) is not None:
                # Only now it is known where it ends: tokens of a stop string may have been cut away.
                shown["text_offset"] = [min(offset, len(text)) for offset in shown["text_offset"]]
            if self.envelope.with_token_ids:
                choice["prompt_token_ids"] = state.prompt
            if self.envelope.num_prompt_logprobs is not None:
                choice["prompt_logprobs"] = self.envelope.prompt_logprobs(state)
            choices.append(choice)
        return self.envelope.wrap("text_completion", choices)

    def closing(self) -> dict[str, Any]:
        """See `ResponseFormat`."""
        return self.envelope.wrap("text_completion", [])

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
        shown = self._logprobs(tokens, logprobs, state) if self.envelope.num_logprobs is not None else None
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": shown,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
        if self.envelope.with_token_ids:
            choice["token_ids"] = tokens
        return choice

    def _logprobs(
        self, tokens: list[int], logprobs: list[TokenLogprobs], state: ChoiceState
    ) -> dict[str, Any]:
        assert state.offsets is not None
        entries: list[TokenLogprobs | None] = list(logprobs)
        offsets = state.offsets.of(tokens)
        if state.echoes_logprobs:
            # The prompt is told once, and nothing is known of its first token.
            state.echoes_logprobs = False
            offsets = [*echo_offsets(self.envelope.codec, state.prompt, state.echo), *offsets]
            tokens = [*state.prompt, *tokens]
            entries = [None, *state.prompt_logprobs, *entries]
        name_of = self.envelope.token_name
        names = [name_of(token) for token in tokens]
        alternatives: list[dict[str, float] | None] = []
        for name, entry in zip(names, entries, strict=False):
            if entry is None:
                alternatives.append(None)
                continue
            # Of the prompt more may be known, for `prompt_logprobs`.
            top: dict[str, float] = {}
            for token, value in _top(entry, self.envelope.num_logprobs):
                top.setdefault(name_of(token), _finite(value))  # of two of a name the likelier
            # OpenAI always lists the token chosen, which sampling may have taken from further down.
            top.setdefault(name, _finite(entry.logprob))
            alternatives.append(top)
        return {
            "tokens": names,
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
            "top_logprobs": alternatives,
            "text_offset": offsets,
        }


class ChatFormat:
    """`/v1/chat/completions`."""

    def __init__(self, envelope: Envelope) -> None:
        self.envelope = envelope

    def chunk(self, update: Update, state: ChoiceState) -> dict[str, Any] | None:
        """See `ResponseFormat`. The role is sent by `role_chunk`."""
        delta = self._delta(update, state)
        shows_tokens = self.envelope.with_token_ids or self.envelope.num_logprobs is not None
        shows_tokens = shows_tokens or update.step is not None
        if not delta and update.finish_reason is None and not shows_tokens:
            return None  # the parser of calls holds it back
        choice: dict[str, Any] = {
            "index": update.choice,
            "delta": delta,
            "logprobs": self._logprobs(update.tokens, update.logprobs),
            "finish_reason": state.shown_finish_reason(update.finish_reason),
        }
        if update.finish_reason is not None:
            choice["stop_reason"] = update.stop_reason
        if self.envelope.with_token_ids:
            choice["token_ids"] = update.tokens
        return self.envelope.wrap("chat.completion.chunk", [choice])

    def _delta(self, update: Update, state: ChoiceState) -> dict[str, Any]:
        if not state.holds_back:
            return {"content": update.text} if update.text or update.finish_reason is None else {}
        parsed = state.parse(update.text, update.tokens, ends=update.finish_reason is not None)
        delta: dict[str, Any] = {"reasoning_content": parsed.reasoning} if parsed.reasoning else {}
        if parsed.content:
            delta["content"] = parsed.content
        if parsed.calls:
            delta["tool_calls"] = [_call_delta(call) for call in parsed.calls]
        return delta

    def role_chunk(self, index: int, state: ChoiceState) -> dict[str, Any]:
        """The first chunk of a choice."""
        state.started = True
        # None where there will be no text, as a whole message says it, and OpenAI's streams of forced calls.
        is_text = state.parser is None or state.parser.has_text
        delta = {"role": "assistant", "content": state.echo or ("" if is_text else None)}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        body = self.envelope.wrap("chat.completion.chunk", [choice])
        if self.envelope.with_token_ids:
            body["prompt_token_ids"] = state.prompt
        return body

    def whole(self, states: Sequence[ChoiceState]) -> dict[str, Any]:
        """See `ResponseFormat`."""
        choices = []
        for index, state in enumerate(states):
            choice: dict[str, Any] = {
                "index": index,
                "message": self._message(state),
                "logprobs": self._logprobs(state.tokens, state.logprobs),
                "finish_reason": state.shown_finish_reason(state.finish_reason),
                "stop_reason": state.stop_reason,
            }
            if self.envelope.with_token_ids:
                choice["token_ids"] = state.tokens
            choices.append(choice)
        body = self.envelope.wrap("chat.completion", choices)
        if self.envelope.with_token_ids:
            body["prompt_token_ids"] = states[0].prompt
        if self.envelope.num_prompt_logprobs is not None:
            body["prompt_logprobs"] = self.envelope.prompt_logprobs(states[0])
        return body

    def _message(self, state: ChoiceState) -> dict[str, Any]:
        parsed = state.parse_whole()
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
        if state.reasoning is not None and state.reasoning.is_told:
            message["reasoning_content"] = parsed.reasoning or None
        if parsed.calls or parsed.reasoning or (state.parser is not None and not state.parser.has_text):
            message["content"] = parsed.content or None
        if state.echo:
            message["content"] = state.echo + parsed.content
        if parsed.calls:
            message["tool_calls"] = [_whole_call(call) for call in parsed.calls]
        return message

    def closing(self) -> dict[str, Any]:
        """See `ResponseFormat`."""
        return self.envelope.wrap("chat.completion.chunk", [])

    def _logprobs(self, tokens: list[int], logprobs: list[TokenLogprobs]) -> dict[str, Any] | None:
        if self.envelope.num_logprobs is None:
            return None
        return {"content": token_logprobs(self.envelope, tokens, logprobs), "refusal": None}


def token_logprobs(
    envelope: Envelope, tokens: Sequence[int], entries: Sequence[TokenLogprobs]
) -> list[dict[str, Any]]:
    """OpenAI's newer form: each token with its bytes and its alternatives."""

    def shown(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": envelope.token_name(token),
            "logprob": _finite(logprob),
            "bytes": list(envelope.codec.token_bytes(token)),
        }

    return [
        {
            **shown(token, entry.logprob),
            "top_logprobs": [shown(other, value) for other, value in _top(entry)],
        }
        for token, entry in zip(tokens, entries, strict=False)
    ]


def _whole_call(call: CallDelta) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if not call.call_id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_whole_call(call)}


def _top(entry: TokenLogprobs, most: int | None = None) -> list[tuple[int, float]]:
    return list(zip(entry.top_ids, entry.top_logprobs, strict=True))[:most]


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
