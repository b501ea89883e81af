"""A cell without models: a real TCP server speaking the stream protocol, with scripted tokens."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec

from cluster.stream_messages import (
    Cancel,
    CancelMatching,
    ClientMessage,
    NumCancelled,
    Receipt,
    Rejected,
    StepTrace,
    Submit,
    Terms,
    TokenBatch,
    TokenEvent,
)
from cluster.transport import read_frame, write_frame
from engine import wire
from verifier.messages import TokenLogprobs

_decoder: wire.Decoder[ClientMessage] = wire.Decoder(ClientMessage)


class CellStandIn:
    """Answers each submission with `script(submit)`, `per_step` tokens at a time, `pause_s` apart.

    Attributes:
        submissions, cancels: what arrived, in order; `moved` are the cancels of what another cell takes.
        finish_reason: put over the reason of the last event.
        ready, stage: what it says of itself; None leaves the stage out.
        num_described: how often it was asked to.
        lose_after: hang up on everybody once a request has been sent that many tokens (one entry per loss).
        repeat: start resubmitted requests over from position 0, as a cell that knows no better would.
        reject: answer submissions with this instead.
        starved: never send anything.
        away: refuse to be located.
        stopped: say nothing at all, as a stopped process; what would have been said comes when it goes on.
        score: log-probability of every token of an answer.
        terms: what its receipts say that requests were served on.
        path, fingerprint, adapters, default_max_tokens, drafters: of its model, as it describes itself.
        max_requests: of all cells, as it describes them.
    """

    def __init__(
        self, script: Callable[[Submit], list[int]], *, vocab_size: int = 512, max_tokens: int = 256
    ) -> None:
        self.script = script
        self.vocab_size = vocab_size
        self.max_tokens = max_tokens
        self.per_step = 3
        self.pause_s = 0.0
        self.submissions: list[Submit] = []
        self.cancels: list[str] = []
        self.moved: list[str] = []
        self.lose_after: list[int] = []
        self.repeat = False
        self.reject: Rejected | None = None
        self.starved = False
        self.away = False
        self.stopped = False
        self.score: Callable[[Submit], float] = lambda submit: -0.25
        self.terms: Terms | None = None
        self.ready = True
        self.stage: str | None = None
        self.num_described = 0
        self.path, self.fingerprint = "", "flotilla-0-0"
        self.adapters: dict[str, str] = {}
        self.default_max_tokens: int | None = None
        self.max_requests = 320
        self.drafters = ["small", "lookup"]
        self.finish_reason: str | None = None
        self.error = ""
        self._token = b"sesame"
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._beats: set[asyncio.Task[None]] = set()
        self._tasks: dict[tuple[asyncio.StreamWriter, str], asyncio.Task[None]] = {}

    # -- control calls -----------------------------------------------------------------------------

    async def endpoint(self) -> tuple[str, int, bytes]:
        if self.away:
            raise ConnectionError("no such actor")
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return "127.0.0.1", self._server.sockets[0].getsockname()[1], self._token

    async def describe(self) -> dict[str, Any]:
        self.num_described += 1
        await asyncio.sleep(0)
        if self.away:
            raise ConnectionError("no such actor")
        stage = {} if self.stage is None else {"stage": self.stage}
        return stage | {
            "model": "demo",
            "max_tokens": self.max_tokens,
            "default_max_tokens": self.default_max_tokens,
            "max_requests": self.max_requests,
            "vocab_size": self.vocab_size,
            "drafters": self.drafters,
            "policy": "flotilla",
            "ready": self.ready,
            "path": self.path,
            "fingerprint": self.fingerprint,
            "adapters": self.adapters,
            "baseline": {"target": {"delta": 0.010, "gamma": 0.001}, "overhead_s": 0.001, "chunk_tokens": 8},
        }

    async def metrics(self) -> str:
        return "# TYPE flotilla_requests_total counter\nflotilla_requests_total 1\n"

    async def workers(self) -> list[dict[str, Any]]:
        if self.away:
            raise ConnectionError("no such actor")
        return [{"worker": "verifier", "process": "verifier", "kind": "target", "state": "ready"}]

    async def check_health(self) -> None:
        return None

    # -- streams -----------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Lose every connection and forget every request."""
        for task in [*self._tasks.values(), *self._beats]:
            task.cancel()
        self._beats.clear()
        self._tasks.clear()
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        """In the loop that it serves in: a gRPC server's thread may be ending its own at this very moment.

        Servers of asyncio are not to be closed by two threads, and a loop that ends hangs up too.
        """
        loop = asyncio.get_running_loop() if self._server is None else self._server.get_loop()
        if loop is not asyncio.get_running_loop():
            with contextlib.suppress(RuntimeError):  # closed: nothing runs there any more
                loop.call_soon_threadsafe(self._close)
                return
        self._close()

    def _close(self) -> None:
        self.hang_up()
        if self._server is not None:
            self._server.close()

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            await self._while_stopped()
            write_frame(writer, b"")
            await asyncio.sleep(0.02)

    async def _while_stopped(self) -> None:
        while self.stopped:
            await asyncio.sleep(0.005)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            assert await read_frame(reader) == self._token
            beating = asyncio.create_task(self._beat(writer))
            self._beats.add(beating)
            while True:
                message = _decoder.decode(await read_frame(reader))
                if isinstance(message, CancelMatching):
                    found = [key for key in self._tasks if key[1].startswith(message.prefix)]
                    for key in found:
                        self._tasks.pop(key).cancel()
                        self._send(key[0], self._last(key[1], 0, [], "cancelled"))
                    write_frame(writer, wire.encode(NumCancelled(message.ticket, len(found))))
                    continue
                key = (writer, message.request_id)
                if isinstance(message, Cancel):
                    self.cancels.append(message.request_id)
                    self.moved += [message.request_id] * message.is_moved
                    task = self._tasks.pop(key, None)
                    if task is not None:
                        task.cancel()
                        self._send(writer, self._last(message.request_id, 0, [], "cancelled"))
                    continue
                self.submissions.append(message)
                if self.reject is not None:
                    rejected = {**self._fields(self.reject), "request_id": message.request_id}
                    write_frame(writer, wire.encode(Rejected(**rejected)))
                elif not self.starved:
                    self._tasks[key] = asyncio.create_task(self._answer(writer, message))
        except (EOFError, OSError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    @staticmethod
    def _fields(rejected: Rejected) -> dict[str, Any]:
        names = ("code", "message", "retry_after_s", "predicted")
        return {name: getattr(rejected, name) for name in names}

    async def _answer(self, writer: asyncio.StreamWriter, submit: Submit) -> None:
        sampling = submit.sampling
        tokens = self.script(submit)[: sampling.max_tokens]
        reason = "length"
        for index, token in enumerate(tokens):
            if token in sampling.stop_token_ids:
                tokens, reason = tokens[: index + 1], "stop"
                break
        position = 0 if self.repeat else len(submit.output)
        while True:
            await asyncio.sleep(self.pause_s)
            await self._while_stopped()
            part = tokens[position : position + self.per_step]
            ends = position + len(part) >= len(tokens)
            score = self.score(submit)
            logprobs = [self.logprob(token, sampling.logprobs, score) for token in part]
            prompt_logprobs = [] if position else self._prompt_logprobs(submit)
            if ends:
                event = self._last(submit.request_id, position, part, self.finish_reason or reason, logprobs)
                event = msgspec.structs.replace(event, prompt_logprobs=prompt_logprobs, error=self.error)
            else:
                event = TokenEvent(
                    request_id=submit.request_id,
                    position=position,
                    tokens=part,
                    logprobs=[entry for entry in logprobs if entry is not None],
                    prompt_logprobs=prompt_logprobs,
                    drafter="small",
                    num_accepted=len(part) - 1,
                )
            if submit.speculation.trace and part:
                event = msgspec.structs.replace(event, trace=self._trace(submit, position, part, ends))
            position += len(part)
            self._send(writer, event)
            if self.lose_after and position >= self.lose_after[0]:
                self.lose_after.pop(0)
                await writer.drain()
                await asyncio.sleep(0.01)
                self.hang_up()
                return
            if ends:
                return

    def _trace(self, submit: Submit, position: int, part: list[int], ends: bool) -> StepTrace:
        """A chain of what was accepted, and one candidate more that was not verified."""
        num_accepted = 0 if ends else len(part) - 1
        tokens = [submit.prompt[-1], *part[:num_accepted], 3]
        return StepTrace(
            step=position // self.per_step + 1,
            elapsed_ms=5.0 + 2.0 * position,
            drafter="small",
            tokens=tokens,
            parents=list(range(-1, len(tokens) - 1)),
            logps=[-0.5 * node for node in range(len(tokens))],
            verified=list(range(num_accepted + 1)),
            accepted=list(range(1, num_accepted + 1)),
        )

    def _prompt_logprobs(self, submit: Submit) -> list[TokenLogprobs]:
        wanted = submit.sampling.prompt_logprobs
        entries = [self.logprob(token, wanted) for token in submit.prompt[1:]]
        return [entry for entry in entries if entry is not None]

    @staticmethod
    def logprob(token: int, alternatives: int | None, score: float = -0.25) -> TokenLogprobs | None:
        if alternatives is None:
            return None
        others = [token, *(other for other in range(40, 60) if other != token)][:alternatives]
        return TokenLogprobs(score, others, [score - index for index in range(len(others))], rank=1)

    def _last(
        self,
        request_id: str,
        position: int,
        tokens: list[int],
        reason: str,
        logprobs: list[TokenLogprobs | None] | None = None,
    ) -> TokenEvent:
        total = position + len(tokens)
        receipt = Receipt(
            queue_ms=1.0,
            ttft_ms=5.0,
            tpot_ms=2.0,
            e2e_ms=5.0 + 2.0 * max(0, total - 1),
            num_prompt_tokens=7,
            num_cached_tokens=2,
            num_output_tokens=total,
            num_steps=4,
            num_drafted=20,
            num_verified=12,
            num_accepted=8,
            drafters={"small": 6, "lookup": 2},
            num_preemptions=0,
            acceptance_by_depth=[4, 3, 1],
            terms=self.terms,
        )
        return TokenEvent(
            request_id=request_id,
            position=position,
            tokens=tokens,
            logprobs=[entry for entry in logprobs or [] if entry is not None],
            finish_reason=reason,
            receipt=receipt,
        )

    @staticmethod
    def _send(writer: asyncio.StreamWriter, event: TokenEvent) -> None:
        write_frame(writer, wire.encode(TokenBatch([event])))


async def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        await asyncio.sleep(0.005)
