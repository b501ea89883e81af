"""One choice of one request: tokens from the cell in, text with its end decided out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from cluster.stream_messages import Receipt, Submit, TokenEvent
from deployments.cell_clients import CellClients
from deployments.detokenizer import Detokenizer
from deployments.drained_streams import DrainQueue, drained, take
from deployments.errors import ApiError, cancelled
from deployments.receipts import ChoiceOutcome
from deployments.step_traces import TracedStep
from deployments.stop_strings import StopStrings
from verifier.messages import TokenLogprobs

#: How long a choice that a stop string ended waits for the cell's receipt before it answers without.
RECEIPT_WAIT_S = 1.0


@dataclass(frozen=True)
class Update:
    """News of one choice.

    Attributes:
        choice: its index in the response.
        text: new text.
        tokens: new tokens, those of held-back text included.
        logprobs: one per token if asked for.
        finish_reason: "stop" or "length" in the last update.
        stop_reason: the stop string or stop token that ended it; None for the end-of-sequence token.
        outcome: with the finish reason.
        prompt_logprobs: of the prompt from its second token on, with the first tokens, if asked for.
        step: the step of the tokens, if a trace was asked for.
        pieces: the text that each of the tokens added, as far as it is known by token; `text` without what
            had been held back to the end.
    """

    choice: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    outcome: ChoiceOutcome | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    step: TracedStep | None = None
    pieces: Sequence[str] = ()


class TextAssembler:
    """Text of one choice from its tokens, up to its end; knows no clock and no connection.

    It goes token by token, so where the text ends does not depend on how the tokens were batched into steps.
    A stop string that is complete with the first `min_tokens` tokens ends nothing, as in vLLM; the cell sees
    to it that no stop token is among them.

    Attributes:
        finish_reason: "stop" once a stop token or stop string was met.
        stop_reason: which.
        pieces: the text that each of the tokens fed last added.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopStrings,
        stop_ids: frozenset[int],
        *,
        show_stop: bool,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_ids = stop_ids
        self._show_stop = show_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.pieces: Sequence[str] = ()

    def feed(self, tokens: Sequence[int]) -> tuple[str, int]:
        """The new text, and how many of `tokens` belong to the choice."""
        pieces: list[str] = []
        self.pieces = pieces
        for used, token in enumerate(tokens, 1):
            self._num_tokens += 1
            is_stop = token in self._stop_ids
            if not is_stop or self._show_stop:
                pieces.append(self._stops.feed(self._detokenizer.feed(token), stops=self._may_stop))
            if is_stop or self._stops.matched is not None:
                self.finish_reason = "stop"
                self.stop_reason = token if self._stops.matched is None else self._stops.matched
                return "".join(pieces), used
        return "".join(pieces), len(tokens)

    def finish(self) -> str:
        """The text still held back when no more tokens come."""
        # Both give nothing once a stop string matched.
        text = self._stops.feed(self._detokenizer.finish(), stops=self._may_stop) + self._stops.finish()
        if self.finish_reason is None and self._stops.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._stops.matched
        return text

    @property
    def _may_stop(self) -> bool:
        return self._num_tokens > self._min_tokens


async def generate(
    client: CellClients,
    request: Submit,
    assembler: TextAssembler,
    *,
    choice: int,
    arrived: float,
    eos_ids: frozenset[int] = frozenset(),
) -> AsyncGenerator[Update, None]:
    """Run one choice; `arrived` is when the HTTP request came, on `time.perf_counter`.

    Raises what `CellClients.submit` raises, and `ApiError` if the cell gave up on the request.
    """
    first_at: float | None = None
    last_at = arrived
    num_tokens, lives = 0, 1
    async with aclosing(client.submit(request)) as events:
        async for event in events:
            _check_end(event)
            if event.tokens:
                last_at = time.perf_counter()
                first_at = last_at if first_at is None else first_at
            lives = max(lives, client.lives(request.request_id))
            text, used = assembler.feed(event.tokens)
            num_tokens += used
            tokens, logprobs, receipt = event.tokens[:used], event.logprobs[:used], event.receipt
            prompt_logprobs, pieces = event.prompt_logprobs, assembler.pieces
            step = TracedStep.of(event, pieces)
            if event.finish_reason is None:
                # If it is complete by now: show it, and let the cell account for what it did.
                yield Update(
                    choice, text, tokens, logprobs, prompt_logprobs=prompt_logprobs, step=step, pieces=pieces
                )
                if assembler.finish_reason is None:
                    continue
                text, tokens, logprobs, prompt_logprobs, step, pieces = "", [], [], [], None, ()
                client.cancel(request.request_id)
                receipt = await _await_receipt(events)
            text += assembler.finish()
            yield Update(
                choice,
                text,
                tokens,
                logprobs,
                finish_reason=assembler.finish_reason or event.finish_reason,
                stop_reason=None if assembler.stop_reason in eos_ids else assembler.stop_reason,
                outcome=_outcome(
                    request, num_tokens, receipt if lives == 1 else None, receipt, arrived, first_at, last_at
                ),
                prompt_logprobs=prompt_logprobs,
                step=step,
                pieces=pieces,
            )
            return


async def prompt_only(updates: AsyncGenerator[Update, None]) -> AsyncGenerator[Update, None]:
    """A choice of which only the prompt is wanted: what had to be generated is left out."""
    async with aclosing(updates):
        async for update in updates:
            outcome = update.outcome
            yield replace(
                update,
                text="",
                tokens=[],
                logprobs=[],
                finish_reason=None if update.finish_reason is None else "length",
                stop_reason=None,
                step=None,
                outcome=None if outcome is None else replace(outcome, num_output_tokens=0),
            )


async def merge(choices: Sequence[AsyncGenerator[Update, None]]) -> AsyncGenerator[Update, None]:
    """The updates of several choices as they come; the first failure ends all."""
    if len(choices) == 1:
        async with aclosing(choices[0]) as only:
            async for update in only:
                yield update
        return
    queue: DrainQueue[Update] = asyncio.Queue()
    running = len(choices)
    with drained(choices, [queue] * running):
        while running:
            item = await take(queue)
            if item is None:
                running -= 1
            else:
                yield item


def _check_end(event: TokenEvent) -> None:
    if event.finish_reason == "error" and event.error:
        message = f"What the answer must look like cannot be followed any further: {event.error}"
        raise ApiError(400, message, code="invalid_constraint")
    if event.finish_reason == "error":
        raise ApiError(500, "The cell failed on this request; its log says why.", code="cell_error")
    if event.finish_reason == "cancelled":
        raise cancelled()


async def _await_receipt(events: AsyncGenerator[TokenEvent, None]) -> Receipt | None:
    with contextlib.suppress(Exception):
        async with asyncio.timeout(RECEIPT_WAIT_S):
            async for event in events:
                if event.receipt is not None:
                    return event.receipt
    return None


def _outcome(
    request: Submit,
    num_tokens: int,
    clock: Receipt | None,
    receipt: Receipt | None,
    arrived: float,
    first_at: float | None,
    last_at: float,
) -> ChoiceOutcome:
    """`clock` is the receipt if its times cover the whole request."""
    if clock is not None:
        ttft_ms, e2e_ms, tpot_ms = clock.ttft_ms, clock.e2e_ms, clock.tpot_ms
    else:
        ttft_ms = None if first_at is None else 1000 * (first_at - arrived)
        e2e_ms = 1000 * (last_at - arrived)
        tpot_ms = (e2e_ms - ttft_ms) / (num_tokens - 1) if ttft_ms is not None and num_tokens > 1 else None
    return ChoiceOutcome(
        num_prompt_tokens=len(request.prompt),
        num_output_tokens=num_tokens,
        receipt=receipt,
        ttft_ms=ttft_ms,
        e2e_ms=e2e_ms,
        tpot_ms=tpot_ms,
    )
