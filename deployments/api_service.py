"""What the HTTP routes do before an answer: check a request against the cell and prepare its choices."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from cluster.members import SILENT_S
from cluster.stream_messages import NOBODY, Submit, Tenant
from cluster.tier_config import TierConfig
from deployments import reasoning
from deployments import sampling_mapping as mapping
from deployments.answering import Call
from deployments.call_ids import call_prefix, new_call_id
from deployments.cell_clients import CellClients
from deployments.cell_source import CellSource, Endpoint, LocatedCell
from deployments.choice_state import ChoiceState
from deployments.detokenizer import Detokenizer
from deployments.errors import ApiError, not_ready
from deployments.generation import TextAssembler, Update, generate, merge, prompt_only
from deployments.objectives import Asked
from deployments.openai_responses import ChatFormat, CompletionFormat, Envelope
from deployments.openai_schema import ChatRequest, CompletionRequest, GenerationRequest
from deployments.prompt_preparation import prompts_of
from deployments.sampling_defaults import OPENAI_SAMPLING, SamplingDefaults
from deployments.sampling_mapping import CellInfo
from deployments.single_tokens import in_turns, token_by_token
from deployments.stop_strings import StopStrings
from deployments.structured_outputs import ConstraintCheck
from deployments.text_codec import TextCodec
from deployments.text_offsets import TextOffsets
from deployments.tool_parsers import kind_for_template
from deployments.tools import ToolUse

_log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

#: A cell that does not answer within this is not ready.
_DESCRIBE_TIMEOUT_S = 5.0
#: What it said of itself longer ago is asked again.
_HEARD_LATELY_S = 2.0
#: And until it has said it, so often; who looks at it waits no longer for it to be said again.
_LEARN_S = 1.0


class CellControl(Protocol):
    """The control calls of a cell (`cluster.cell.Cell`)."""

    async def endpoint(self) -> Endpoint:
        """Where it listens for streams, and the token that admits."""
        ...

    async def describe(self) -> Mapping[str, Any]:
        """See `CellInfo`."""
        ...

    async def metrics(self) -> str:
        """Prometheus text."""
        ...

    async def decisions(self, limit: int) -> bytes | None:
        """Decisions of the newest steps as JSON lines; None while none are kept."""
        ...

    async def timeline(self) -> bytes | None:
        """Who worked when, in the trace event format; None while it is not kept."""
        ...

    async def workers(self) -> list[dict[str, Any]]:
        """How every worker is."""
        ...


class ApiService:
    """The API of one cell, free of HTTP.

    Args:
        cell: its control calls.
        codec: the target's tokenizer.
        tiers: objectives by service tier.
        give_up_after_s: how long requests wait for a lost cell.
        cells: all cells that serve requests; `cell` alone if it is None.
        tool_parser: how the model writes calls of tools, see `cluster.config.TargetConfig`.
        reasoning_parser: how it marks what it thinks, see there.
        silent_s: a cell that has given no sign of life for so long is left.
        sampling: what requests get that do not say how to sample.
    """

    def __init__(
        self,
        cell: CellControl,
        codec: TextCodec,
        *,
        tiers: Mapping[str, TierConfig] | None = None,
        give_up_after_s: float = 120.0,
        cells: CellSource | None = None,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        silent_s: float = SILENT_S,
        sampling: SamplingDefaults = OPENAI_SAMPLING,
    ) -> None:
        self.tool_parser = kind_for_template(codec.template) if tool_parser == "auto" else tool_parser
        is_auto = reasoning_parser == "auto"
        self._reasoning = reasoning.kind_for_template(codec.template) if is_auto else reasoning_parser
        self._cell = cell
        self._codec = codec
        self._sampling = sampling
        self._tiers = dict(tiers or {})
        self._info: CellInfo | None = None
        self._heard_at = 0.0
        self._hearing: asyncio.Task[CellInfo | ApiError] | None = None
        self._learning: asyncio.Task[None] | None = None
        self._constraints = ConstraintCheck(codec)
        self.client = CellClients(
            cells or LocatedCell(cell.endpoint), give_up_after_s=give_up_after_s, silent_s=silent_s
        )

    @property
    def tiers(self) -> Mapping[str, TierConfig]:
        """Service tiers by name."""
        return self._tiers

    async def describe(self) -> CellInfo:
        """Ask the cell now; raises 503 if it does not answer or is not ready."""
        description = await _answer(self._cell.describe())
        try:
            info = CellInfo.from_description(description)
        except (KeyError, TypeError, ValueError) as error:
            _log.exception("the cell describes itself as nothing that could be served: %s", description)
            raise not_ready("The model does not answer.") from error
        if info.is_loaded:  # what it serves holds, also while its target is being replaced
            self._info, self._heard_at = info, time.monotonic()
        if not info.ready:
            raise not_ready("The model is still loading.")
        return info

    async def info(self, *, waits: bool = False) -> CellInfo:
        """The cell's description as last heard, some seconds ago while requests come; for who waits, now."""
        if self._info is None:
            heard = await asyncio.shield(self._heard())
            if isinstance(heard, ApiError):
                raise heard
            return heard
        if time.monotonic() > self._heard_at + _HEARD_LATELY_S:
            # Others serve after a rollout, with other drafters, limits and costs.
            await asyncio.wait({self._heard()}, timeout=_LEARN_S if waits else 0.0)
        return self._info

    def connect(self) -> None:
        """Connect to cells and learn what they serve, before the first request needs it."""
        self.client.connect()
        if self._learning is None:
            self._learning = asyncio.create_task(self._learn(), name="what cells serve")

    async def _learn(self) -> None:
        while self._info is None:
            await self._heard()
            await asyncio.sleep(_LEARN_S)

    def _heard(self) -> asyncio.Task[CellInfo | ApiError]:
        """One question for all who want to know: what was heard, now or before, or why nothing was."""
        if self._hearing is None or self._hearing.done():
            self._hearing = asyncio.create_task(self._hear(), name="description of the cell")
        return self._hearing

    async def _hear(self) -> CellInfo | ApiError:
        try:
            return await self.describe()
        except ApiError as error:  # it starts, or is gone: what was heard last holds
            return self._info or error

    async def ready(self) -> CellInfo:
        """A cell takes requests now; raises 503 if none does.

        Who is connected to such a cell need not ask: asked would be any cell, perhaps one that hangs.
        """
        if self._info is not None and self.client.can_serve:
            return self._info
        return await self.describe()

    async def prometheus(self) -> str:
        """The cell's metrics; raises 503 if it does not answer."""
        return await _answer(self._cell.metrics())

    async def decisions(self, limit: int) -> bytes | None:
        """Decisions of the newest steps, None while none are kept; raises 503 if the cell does not answer."""
        return await _answer(self._cell.decisions(limit))

    async def timeline(self) -> bytes | None:
        """Who worked when, None while it is not kept; raises 503 if the cell does not answer."""
        return await _answer(self._cell.timeline())

    async def workers(self) -> list[dict[str, Any]]:
        """How every worker is, as of `WorkerHealth.report`; raises 503 if the cell does not answer."""
        return await _answer(self._cell.workers())

    async def cancel(self, request_id: str) -> int:
        """End the choices of all running requests of that id, whoever serves them; how many there were.

        Raises `TimeoutError` if the cell cannot be reached.
        """
        return await self.client.cancel_matching(call_prefix(request_id))

    async def cancel_call(self, call_id: str) -> int:
        """The same of one call."""
        return await self.client.cancel_matching(call_id)

    @property
    def codec(self) -> TextCodec:
        """The target's tokenizer."""
        return self._codec

    async def close(self) -> None:
        """Drop the connection to the cell."""
        for task in (self._hearing, self._learning):
            if task is not None:
                task.cancel()
        await self.client.close()

    # -- requests ------------------------------------------------------------------------------------

    async def begin(
        self,
        request: GenerationRequest,
        request_id: str,
        headers: Asked | None = None,
        *,
        call_id: str | None = None,
        tenant: Tenant = NOBODY,
        repeatable: bool = False,
    ) -> Call:
        """Check everything that can be checked before the cell hears of the request.

        Args:
            request: its body.
            request_id: how the client and the log call it.
            headers: objectives named in headers.
            call_id: one of `new_call_id(request_id)`, where the caller must know it.
            tenant: who competes for the cell with it.
            repeatable: whether updates are to be the same, one by one, in every run (`single_tokens`).
        """
        arrived = time.perf_counter()
        info = await self.info()
        request = self._sampling.applied_to(request)
        wish = request.speculation
        if wish is not None and not set(wish.drafters or ()) <= set(info.drafters):
            info = await self.describe()  # a drafter may have been added since
        adapter = info.adapter_of(request.model)
        seed = mapping.choose_seed(request)
        speculation = mapping.speculation(request, info)
        use = self.tool_use(request)
        constraint = await self._constraints.resolve(request, use, info.vocab_size)
        prompts, prompt_field = await prompts_of(request, self._codec, info, use, self.tool_parser)
        bad_words = self._codec.bad_word_tokens(request.bad_words)
        num_choices = (isinstance(request, CompletionRequest) and request.best_of) or request.n or 1
        call_id = call_id or new_call_id(request_id)
        choices: list[AsyncGenerator[Update, None]] = []
        states: list[ChoiceState] = []
        for one in prompts:
            text, prompt = one.echo, one.tokens
            max_tokens = mapping.max_new_tokens(request, len(prompt), info, prompt_field)
            reckoned = mapping.reckoned_tokens(request, max_tokens)
            contract = mapping.contract(request, headers or Asked(), self._tiers, info, len(prompt), reckoned)
            max_tokens = reckoned if contract.has_e2e else max_tokens  # a time for all of it needs a bound
            form = reasoning.with_thought(constraint, self._reasoning, request, prompt, self._codec, use)
            for _ in range(num_choices):
                submit = Submit(
                    request_id=f"{call_id}-{len(choices)}",
                    prompt=prompt,
                    sampling=mapping.sampling_params(
                        request,
                        seed=mapping.choice_seed(seed, len(choices)),
                        max_tokens=max_tokens,
                        eos_ids=self._codec.eos_ids,
                        info=info,
                        bad_words=bad_words,
                        constraint=form,
                    ),
                    objective=contract.terms.objective,
                    tier=contract.terms.tier,
                    priority=contract.terms.priority,
                    speculation=speculation,
                    on_miss=contract.on_miss,
                    downgrades=contract.downgrades,
                    tenant=tenant,
                    adapter=adapter,
                    cache_salt=request.cache_salt or "",
                    assumed_tokens=reckoned if reckoned < max_tokens else None,
                )
                state = ChoiceState(
                    prompt,
                    echo=text,
                    offsets=TextOffsets(self._detokenizer(request, prompt), len(text)),
                    parser=use.make_parser(),
                    reasoning=reasoning.make_parser(self._reasoning, request, prompt, self._codec, form, use),
                    echoes_logprobs=mapping.echoes(request) and mapping.num_logprobs(request) is not None,
                )
                updates = self._choice(submit, request, len(choices), arrived, state)
                updates = updates if max_tokens else prompt_only(updates)
                choices.append(token_by_token(updates) if repeatable else updates)
                states.append(state)
        return Call(
            updates=in_turns(choices) if repeatable else merge(choices),
            states=states,
            shape=self._shape(request, info, call_id),
            terms=contract.terms,
            seed=seed,
            num_prompts=len(prompts),
            prompt_field=prompt_field,
            includes_usage=request.includes_usage,
            counts_tokens=request.counts_tokens,
            shows_all=bool(request.return_token_ids)
            or mapping.num_logprobs(request) is not None
            or speculation.trace,
            request_id=request_id,
            request=request,
            num_kept=(request.n or 1) if mapping.chooses_best(request) else None,
            num_rejected=self.client.num_rejected,
        )

    def tool_use(self, request: GenerationRequest) -> ToolUse:
        """What the tools of a request mean; raises 400 where they cannot be used."""
        if not isinstance(request, ChatRequest):
            return ToolUse(None, None, self.tool_parser)
        return ToolUse(
            request.tools,
            request.tool_choice,
            self.tool_parser,
            parallel=request.parallel_tool_calls is not False,
            num_earlier=sum(len(message.tool_calls or ()) for message in request.messages),
            token_of=self._codec.single_token,
        )

    # -- parts -----------------------------------------------------------------------------------------

    def _choice(
        self, submit: Submit, request: GenerationRequest, index: int, arrived: float, state: ChoiceState
    ) -> AsyncGenerator[Update, None]:
        show_stop = bool(request.include_stop_str_in_output)
        parsers = (state.parser, state.reasoning)
        keep = [marker for parser in parsers if parser is not None for marker in parser.markers]
        assembler = TextAssembler(
            self._detokenizer(
                request, submit.prompt, keep=keep, is_constrained=submit.sampling.constraint is not None
            ),
            StopStrings(request.stop, include=show_stop),
            frozenset(submit.sampling.stop_token_ids),
            show_stop=show_stop,
            min_tokens=submit.sampling.min_tokens,
        )
        return generate(
            self.client, submit, assembler, choice=index, arrived=arrived, eos_ids=self._codec.eos_ids
        )

    def _detokenizer(
        self,
        request: GenerationRequest,
        prompt: Sequence[int],
        keep: Sequence[str] = (),
        *,
        is_constrained: bool = False,
    ) -> Detokenizer:
        goes_on = not isinstance(request, ChatRequest) or request.continue_final_message
        after: Sequence[int] = prompt if goes_on else ()
        if not goes_on and is_constrained:
            # A space at the beginning is part of what was asked for, and not the decoder's to drop.
            after = self._codec.encode("a", add_special_tokens=False)
        return self._codec.detokenizer(
            skip_special_tokens=request.skip_special_tokens is not False, keep=keep, after=after
        )

    def _shape(
        self, request: GenerationRequest, info: CellInfo, call_id: str
    ) -> CompletionFormat | ChatFormat:
        is_chat = isinstance(request, ChatRequest)
        envelope = Envelope(
            response_id=("chatcmpl-" if is_chat else "cmpl-") + call_id,
            model=request.model or info.model,
            codec=self._codec,
            fingerprint=info.fingerprint,
            shows_tier=request.service_tier is not None,
            with_token_ids=bool(request.return_token_ids),
            num_logprobs=mapping.num_logprobs(request),
            num_prompt_logprobs=request.prompt_logprobs,
            tokens_as_ids=bool(request.return_tokens_as_token_ids),
        )
        return ChatFormat(envelope) if is_chat else CompletionFormat(envelope)


async def _answer(call: Awaitable[Answer]) -> Answer:
    """What the cell says in time; raises 503 if it says nothing."""
    try:
        async with asyncio.timeout(_DESCRIBE_TIMEOUT_S):
            return await call
    except Exception as error:  # a remote call: anything may come out of it
        _log.warning("the cell does not answer: %r", error)
        raise not_ready("The model does not answer.") from error
