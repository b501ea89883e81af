"""One target model deciding tokens for many requests: prefill chunks and draft trees in one forward."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.device_rows import DeviceRowsRunner
from engine.devices import CPU, Stopwatch
from engine.grammar import GrammarError, Grammars
from engine.proposals import Proposals
from engine.runner import KeyTokens, ModelRunner
from engine.slots import OutOfSlots
from verifier.begun import Begun
from verifier.commuting import commute, num_rows
from verifier.deciding import Decided, decided_of, rows_read
from verifier.launching import launch
from verifier.messages import (
    PrefillItem,
    PrefillProgress,
    TokenLogprobs,
    Verdict,
    VerifyCall,
    VerifyItem,
    VerifyResult,
)
from verifier.planning import NotPlanned, Planned, PromptComplete, PromptIncomplete, RequestTable
from verifier.proposing import Asking, Proposer, Read, ReadingProposer
from verifier.verdicts import digest_of, failure_of, prompt_logprobs_of, with_proposals

Int32 = NDArray[np.int32]

logger = logging.getLogger(__name__)


class Verifier:
    """Serves verify calls over one model runner, whose KV storage it alone uses.

    What a request returns depends on its specification only (design, idea 2): not on trees, chunks,
    neighbours in the batch, preemption or restart. Deterministic, so that tensor-parallel ranks that
    serve the same calls stay in step.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        prefix_sharing: bool = True,
        proposer: Proposer | None = None,
        grammars: Grammars | None = None,
        adapters: Sequence[str] = (),
        device: torch.device = CPU,
        overlaps: bool = False,
        num_ranks: int = 1,
    ) -> None:
        """Serve with the model of `runner`, what proposes beside it if anything does, and `grammars`.

        `adapters` are the names of those that the runner has, in the order of their numbers.

        `device` is where the runner's logits are. If `overlaps`, a call may be begun while another is
        computed, which helps on a GPU. Which ones is a matter of when they come, to each of `num_ranks` by
        itself: where there are several, only calls that may come either way.
        """
        self._runner = runner
        self._device = device
        self._overlaps = overlaps and isinstance(runner, DeviceRowsRunner)
        self._num_ranks = num_ranks
        self._proposer = proposer
        self._reader = proposer if isinstance(proposer, ReadingProposer) else None
        # Of reads that the device had not come to when their calls were answered.
        self._being_read: list[Stopwatch] = []
        self._table = RequestTable(
            runner.shape,
            runner.num_slots,
            prefix_sharing=prefix_sharing,
            grammars=grammars,
            adapters=adapters,
            leaving=None if self._reader is None else self._reader.release,
        )

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._table

    @property
    def overlaps(self) -> bool:
        """Whether a call may be begun while another is computed."""
        return self._overlaps

    @property
    def free_slots(self) -> int:
        """KV slots that can be given out, those of evictable shared prefixes included."""
        return self._table.free_slots

    def forget_all(self, *, with_prefixes: bool) -> None:
        """Drop all requests, and if asked to also the KV that prompts to come could share."""
        if with_prefixes and self._reader is not None:
            self._reader.forget_all()
        self._table.forget_all(with_prefixes=with_prefixes)

    def step(self, call: VerifyCall) -> VerifyResult:
        """Serve one call (see `verifier.messages`).

        A bad item harms nobody else: a malformed tree is verified as if nothing had been drafted; a
        request whose specification cannot be run, or whose tree does not continue what the verifier
        knows, is dropped and reported as unknown; a second item of one request is ignored. A request
        that has all its tokens already gets a verdict without any, and one whose grammar cannot be followed
        gets one that says so.

        Raises:
            Exception: whatever the model's forward raises; requests are then as before their items.
        """
        return self.finish(self.begin(call))

    def begin(self, call: VerifyCall) -> Begun:
        """The first half of `step`: its forward and decisions are launched, or on a CPU computed.

        No other call may be begun before it is finished, but one by `begin_following`.

        Raises:
            Exception: as `step`.
        """
        begun = Begun(call, time.perf_counter())
        for request_id in call.release:
            self._table.forget(request_id)
        self._plan(begun)
        self._launch(begun)
        return begun

    def begin_following(self, call: VerifyCall, before: Begun) -> Begun | None:
        """Begin the next call while one is computed; None, and nothing is changed, if it has to wait.

        It need not if it goes on from what plain rows of that one decide, which the device knows, or if it is
        about other requests. Then it is to be finished next after that one.

        Raises:
            Exception: whatever the model's forward raises; requests are then as before its items.
        """
        if not before.is_open or before.follower is not None:
            return None
        at_work = {p.state.request_id: p for p in before.planned}
        num_shared = sum(item.request_id in at_work for item in call.verify)
        if not self._may_follow(call, at_work) or (num_shared and not self._continues(call, at_work)):
            return None
        if self._num_ranks > 1 and not commute(before.planned, call, at_work, self._table.empty_slots):
            return None
        begun = Begun(call, time.perf_counter())
        # What holds rows of the call before is let go when that is finished, and in the order asked for.
        if any(request_id in at_work for request_id in call.release):
            before.releases = call.release
        else:
            for request_id in call.release:
                self._table.forget(request_id)
        following = [at_work[item.request_id] for item in call.verify] if num_shared else []
        parts = [at_work[item.request_id] for item in call.prefill if item.request_id in at_work]
        self._table.keep([*following, *parts])
        if num_shared:
            begun.planned = self._table.plan_next(following)
            self._plan_prompts(begun, call.prefill)
        else:
            self._plan(begun)
        self._launch(begun, before, following)
        before.follower = begun
        return begun

    def _may_follow(self, call: VerifyCall, at_work: Mapping[str, Planned]) -> bool:
        """Whether it names nobody twice, there are slots for it, and it can use nothing of the one before."""
        names = [item.request_id for item in call.verify] + [item.request_id for item in call.prefill]
        distinct = set(names)
        if len(distinct) < len(names) or not distinct.isdisjoint(call.release):
            return False
        if num_rows(call) > self._table.free_slots:
            return False
        parts = [(item, at_work[item.request_id]) for item in call.prefill if item.request_id in at_work]
        # Of a prompt the next part, if the one before was not the last.
        if any(item.spec is not None or not p.is_prefill or p.tree is not None for item, p in parts):
            return False
        # A prompt that is complete may be the beginning of others.
        before = list(at_work.values())
        return not any(
            item.spec is not None and self._table.shares_with(item.spec, before) for item in call.prefill
        )

    def _continues(self, call: VerifyCall, at_work: Mapping[str, Planned]) -> bool:
        """Whether a call only verifies what goes on from tokens which the one before it decides."""
        if any(i.tree is not None or i.plan is not None or i.num_candidates for i in call.verify):
            return False
        rows = [at_work.get(item.request_id) for item in call.verify]
        return all(p is not None and p.decides_one and p.state.remaining > 1 for p in rows)

    def finish(self, begun: Begun) -> VerifyResult:
        """The second half of `step`, which waits for the device.

        Raises:
            Exception: as `step`.
        """
        planned, launched, follower = begun.planned, begun.launched, begun.follower
        verdicts: list[Verdict | None] = []
        prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        forward_seconds = 0.0
        keys = KeyTokens(0, 0)
        if launched is not None:
            try:
                prompt_logprobs = prompt_logprobs_of(planned, launched.prompt_logits)
                decided = decided_of(planned, launched)
                proposing = self._propose(begun, decided)
            except BaseException:
                self._abandon(planned)
                raise
            keys = launched.keys
            # While the device drafts.
            self._table.settle(
                [
                    (p, one.kept, one.verdict.tokens if one.verdict is not None else [])
                    for p, one in zip(planned, decided, strict=True)
                ]
            )
            verdicts = with_proposals(planned, [one.verdict for one in decided], proposing())
            forward_seconds = launched.forward.seconds() + self._read_s(may_wait=follower is None)
        result = VerifyResult(
            call_id=begun.call.call_id,
            verdicts=[v for p, v in zip(planned, verdicts, strict=True) if v is not None and not p.is_prefill]
            + begun.finished,
            prefills=[
                PrefillProgress(
                    request_id=p.state.request_id,
                    num_computed=self._table.num_computed(p.state.request_id),
                    num_cached=p.num_cached or 0,
                    verdict=verdict,
                    prompt_logprobs=prompt_logprobs.get(p.state.request_id, []),
                )
                for p, verdict in zip(planned, verdicts, strict=True)
                if p.is_prefill
            ],
            deferred=begun.deferred,
            unknown=begun.unknown,
            # Those that the next call has taken already are its own.
            free_slots=self._table.free_slots + (0 if follower is None else follower.num_rows),
            num_tokens=begun.num_rows,
            key_tokens=keys.real,
            padded_tokens=keys.padding,
            seconds=time.perf_counter() - begun.started,
            forward_seconds=forward_seconds,
            digest=digest_of(verdicts),
        )
        for request_id in begun.releases:
            self._table.forget(request_id)
        if follower is not None:
            follower.started = time.perf_counter()
        return result

    def _plan(self, begun: Begun) -> None:
        """Note what becomes of each item of a call: rows of the forward, or why not."""
        call = begun.call
        seen: set[str] = set()

        def is_first(item: VerifyItem | PrefillItem) -> bool:
            if item.request_id in seen:
                logger.error("second item of request %s in call %d ignored", item.request_id, call.call_id)
                return False
            seen.add(item.request_id)
            return True

        trees: list[VerifyItem] = []
        for tree in call.verify:
            if is_first(tree):
                if self._table.is_finished(tree):
                    begun.finished.append(Verdict(request_id=tree.request_id, tokens=[]))
                else:
                    trees.append(tree)
        for tree, outcome in zip(trees, self._table.plan_verify(trees), strict=True):
            if isinstance(outcome, Planned):
                begun.planned.append(outcome)
            else:
                self._note(begun, tree.request_id, outcome)
        self._plan_prompts(begun, [chunk for chunk in call.prefill if is_first(chunk)])

    def _plan_prompts(self, begun: Begun, chunks: Sequence[PrefillItem]) -> None:
        for chunk in chunks:
            try:
                begun.planned.append(self._table.plan_prefill(chunk))
            except PromptComplete:
                continue
            except (OutOfSlots, KeyError, GrammarError, ValueError) as error:
                self._note(begun, chunk.request_id, error)

    def _note(self, begun: Begun, request_id: str, why: NotPlanned) -> None:
        """Note what becomes of an item that has no rows."""
        if isinstance(why, OutOfSlots | PromptIncomplete):
            begun.deferred.append(request_id)
        elif isinstance(why, KeyError):
            begun.unknown.append(request_id)
        elif isinstance(why, GrammarError):
            begun.finished.append(failure_of(request_id, why))
        else:
            logger.error("request %s dropped: %s", request_id, why)
            self._table.forget(request_id)
            begun.unknown.append(request_id)

    def _launch(self, begun: Begun, before: Begun | None = None, following: Sequence[Planned] = ()) -> None:
        """Compute what is planned, on a GPU without waiting for it.

        The first rows follow rows of the call `before`, `following`, whose tokens only the device knows.
        """
        if not begun.planned:
            return
        has_logprobs = any(
            p.state.params.logprobs is not None or p.state.wants_prompt_logprobs for p in begun.planned
        )
        # Log-probabilities and proposals are made of what the next forward overwrites; and of proposals that
        # came after it the answer would come too late.
        asks = self._proposer is not None and any(p.num_candidates for p in begun.planned)
        # Ranks that read before a request goes, and after it, would not read the same rows together.
        reads_in_turn = self._reader is not None and self._num_ranks > 1
        begun.is_open = self._overlaps and not (has_logprobs or asks or reads_in_turn)
        try:
            tokens = before.tokens_after(following) if before is not None and following else None
            begun.launched = launch(self._runner, self._device, begun.planned, tokens)
            if self._reader is not None and begun.is_open:
                begun.held = self._reader.hold(begun.num_rows)
        except BaseException:
            self._abandon(begun.planned)
            raise

    def _abandon(self, planned: Sequence[Planned]) -> None:
        for p in planned:
            self._table.abandon(p)

    def _propose(self, begun: Begun, decided: Sequence[Decided]) -> Callable[[], dict[int, Proposals]]:
        """Begin to find what follows the tokens of those that asked: it is there, by their places, when asked
        for again."""
        if self._proposer is None:
            return dict
        reads: list[Read] = []
        asking: list[Asking] = []
        places: list[int] = []
        first = 0
        for i, (p, one) in enumerate(zip(begun.planned, decided, strict=True)):
            if self._reader is not None and len(one.kept):
                reads.append(rows_read(p, one, first))
            first += len(p.segment.tokens)
            verdict = one.verdict
            if p.num_candidates < 1 or verdict is None or not p.state.goes_on_after(verdict.tokens):
                continue
            read = len(reads) - 1
            asking.append(
                Asking(
                    p.state,
                    verdict.tokens,
                    one.row,
                    p.num_candidates,
                    p.num_heads,
                    read,
                    p.least_logp,
                    p.stop_token_logp,
                )
            )
            places.append(i)
        if self._reader is not None and reads:
            self._being_read.append(self._reader.read(reads, is_asked=bool(asking), held=begun.held))
        found = self._proposer.propose(asking, begun.call.stop_rule)
        return lambda: dict(zip(places, found(), strict=True))

    def _read_s(self, *, may_wait: bool) -> float:
        """Seconds of reads that are done; what another forward was launched before counts when it is."""
        done = [watch for watch in self._being_read if may_wait or watch.has_stopped]
        self._being_read = [watch for watch in self._being_read if watch not in done]
        return sum([watch.seconds() for watch in done])
