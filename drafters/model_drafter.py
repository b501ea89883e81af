"""A causal language model as drafter: beams for a whole micro-batch, one forward per layer."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from drafters.beam import Beam
from drafters.forwards import catch_up, grow
from drafters.heard import fit_plan, news
from drafters.job import Held, Job
from drafters.messages import Draft, DraftCall, DraftItem, DraftResult
from drafters.next_tokens import NextTokens
from drafters.noise_window import close_windows, move_windows
from drafters.protocol import Capabilities
from engine.kv_cache import KVCache
from engine.runner import ModelRunner
from engine.slots import OutOfSlots

Int32 = NDArray[np.int32]

CATCH_UP_ROWS = 512


class ModelDrafter:
    """Drafts candidate trees by beam search on a causal language model (AdaServe, step 1).

    The rows of all requests of a call go through each forward together. KV of the nodes a call drafted is
    kept until the next call, so that committed tokens which follow a drafted path cost no recomputation.
    Released and evicted requests leave their KV behind as shared prefix: reopened soon, they cost little.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_depth: int = 16,
        max_width: int = 16,
        catch_up_rows: int = CATCH_UP_ROWS,
        prefix_sharing: bool = True,
    ) -> None:
        """A drafter on `runner`, whose KV slots it takes over.

        Args:
            runner: the model.
            max_depth, max_width: bounds of every plan; larger plans are cut down to them.
            catch_up_rows: most rows in one catch-up forward, which bounds memory on long prompts.
            prefix_sharing: whether requests share KV of equal prefixes.
        """
        self._model = NextTokens(runner)
        self._kv = KVCache(runner.num_slots, prefix_sharing=prefix_sharing)
        self._held: dict[str, Held] = {}  # least recently used first
        self._catch_up_rows = catch_up_rows
        self._in_call: set[str] = set()
        self._capabilities = Capabilities(
            kind="model",
            max_depth=max_depth,
            max_width=max_width,
            has_probabilities=True,
            needs_prefill=True,
            vocab_size=runner.shape.vocab_size,
            max_tokens=runner.shape.max_tokens,
            num_slots=runner.num_slots,
        )

    @property
    def capabilities(self) -> Capabilities:
        """What this drafter can do."""
        return self._capabilities

    @property
    def free_slots(self) -> int:
        """KV slots that no open request holds."""
        return self._kv.free_slots

    def draft(self, call: DraftCall) -> DraftResult:
        """Draft for every item of the call.

        A request not held at the position named goes to `unknown`. A tree may be smaller than planned:
        at the end of the model's context, of the request's `max_tokens`, after stop tokens, for lack of
        KV slots, or because the request holds a token of a target's larger vocabulary. The layer that
        falls below the plan's `stop_logp` is the last one of its tree. For what `logp` means to sampling
        requests see `drafters.next_tokens`.
        """
        started = perf_counter()
        self._model.reset()
        for request_id in call.release:
            self._forget(request_id)
        self._in_call = {item.request_id for item in call.items}
        jobs: list[Job] = []
        unknown: list[str] = []
        for item in call.items:
            job = self._hear(item)
            if job is None:
                unknown.append(item.request_id)
            else:
                jobs.append(job)
        ready = [job for job in jobs if self._prepare(job)]
        with torch.inference_mode():
            windows = [
                (job.held.noise, job.held.decisions(job.beam.plan.depth))
                for job in ready
                if job.held.noise is not None
            ]
            move_windows(windows, self._capabilities.vocab_size, self._model.device)
            catch_up(ready, self._model, self._kv, self._catch_up_rows)
            for job in ready:
                if job.opened:
                    self._kv.publish(job.request_id, job.held.tokens)
                job.held.last = job.beam
                job.slots = self._reserve_layers(job)
            grow(ready, self._model, self._kv, call.stop_rule)
            close_windows((window for window, _ in windows), self._capabilities.vocab_size)
        return DraftResult(
            call_id=call.call_id,
            drafts=[
                Draft(
                    request_id=job.request_id,
                    tree=job.beam.tree(),
                    num_scored=job.num_scored,
                    num_agreed=job.num_agreed,
                )
                for job in jobs
            ],
            unknown=unknown,
            seconds=perf_counter() - started,
            forward_seconds=self._model.seconds,
            num_forwards=self._model.num_forwards,
        )

    def _hear(self, item: DraftItem) -> Job | None:
        """Take in the item's tokens: score and keep what follows the last tree; None if unknown."""
        request_id = item.request_id
        held = self._held.get(request_id)
        change = news(held, item)
        if change is None:
            return None
        kept, new = change
        if item.spec is not None:
            self._forget(request_id)
            held = Held.open(item.spec)
        elif held is not None:
            del self._held[request_id]
        else:
            return None
        self._held[request_id] = held  # now the most recently used
        last, held.last = held.last, None
        follows = kept == len(held.tokens)
        if not follows:
            held.roll_back(kept)
        held.tokens += new
        held.is_foreign = held.is_foreign or max(new, default=0) >= self._capabilities.vocab_size
        job = Job(
            request_id, held, Beam(held.tokens[-1], fit_plan(item.plan, held, self._capabilities), held.stops)
        )
        if request_id in self._kv:
            if follows and last is not None:
                self._follow(job, last, new)
            self._kv.discard(request_id)
            if not follows and self._kv.length(request_id) > kept:
                self._kv.truncate(request_id, kept)
        return job

    def _follow(self, job: Job, last: Beam, new: list[int]) -> None:
        """Walk the last tree along the newly committed tokens: score them, keep the KV of those it holds."""
        node = scored = 0
        path: list[int] = []
        for index, token in enumerate(new):
            choice = last.first_choice[node]
            if choice < 0:
                break
            scored += 1
            job.num_agreed += choice == token
            node = last.child(node, token)
            if node < 0:
                break
            # The new root is forwarded in any case: its logits are needed, at this plan's width.
            if len(path) == index < len(new) - 1 and last.slot[node] >= 0:
                path.append(last.slot[node])
        job.num_scored += scored
        job.held.scored += scored
        if path:
            self._kv.commit(job.request_id, np.array(path, dtype=np.int32))

    def _prepare(self, job: Job) -> bool:
        """Reserve the slots that catching up needs; False if the item must do without drafting."""
        request_id, tokens = job.request_id, job.held.tokens
        if len(tokens) > self._capabilities.max_tokens or job.held.is_foreign:
            if request_id in self._kv:
                self._kv.release(request_id)
            return False
        if request_id not in self._kv:
            self._kv.open(request_id, tokens)
            job.opened = True
        elif self._kv.length(request_id) == len(tokens):  # asked again: the root's logits are needed
            self._kv.truncate(request_id, len(tokens) - 1)
        job.done = self._kv.length(request_id)
        slots = self._reserve(request_id, len(tokens) - job.done)
        if slots is None:
            return False
        job.slots = slots
        job.held.begin()
        return True

    def _reserve_layers(self, job: Job) -> Int32:
        """Slots for the tree's rows, for as many layers as there are slots. The last layer needs none."""
        plan = job.beam.plan
        for layers in range(plan.depth - 1, 0, -1):
            slots = self._reserve(job.request_id, layers * plan.width)
            if slots is not None:
                return slots
        return np.zeros(0, dtype=np.int32)

    def _reserve(self, request_id: str, n: int) -> Int32 | None:
        """`n` slots for the request, at the cost of those not in this call; None if that is not enough."""
        try:
            return self._kv.reserve(request_id, n)
        except OutOfSlots:
            return self._reclaim(request_id, n)

    def _reclaim(self, request_id: str, n: int) -> Int32 | None:
        """Free slots of requests outside this call until `n` can be reserved: last trees, then all."""
        idle = [other for other in self._held if other not in self._in_call and other in self._kv]
        for other in idle:
            last = self._held[other].last
            if last is not None:
                self._kv.discard(other)
                last.lose_slots()
        if self._kv.free_slots + sum(self._kv.length(other) for other in idle) >= n:
            for other in idle:
                if self._kv.free_slots >= n:
                    break
                self._forget(other)
        try:
            return self._kv.reserve(request_id, n)
        except OutOfSlots:
            return None

    def _forget(self, request_id: str) -> None:
        """Drop a request; its committed KV stays as shared prefix until the slots are needed."""
        held = self._held.pop(request_id, None)
        if request_id in self._kv:
            if held is not None:
                self._kv.publish(request_id, held.tokens)
            self._kv.release(request_id)
