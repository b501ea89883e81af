"""A causal language model as drafter: beams for a whole micro-batch, one forward per layer."""

from __future__ import annotations

from functools import partial
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from drafters.computed_tree import NONE, ROOT, ComputedTree
from drafters.device_draft import DeviceDraft
from drafters.draft_ahead import DraftAhead
from drafters.forwards import catch_up, compute, grow
from drafters.heard import fit_plan, news
from drafters.job import Held, Job
from drafters.layer_graphs import LayerGraphs
from drafters.messages import Draft, DraftCall, DraftItem, DraftResult
from drafters.next_tokens import NextTokens
from drafters.noise_window import close_windows, move_windows
from drafters.protocol import Capabilities
from engine.beam import Beam
from engine.cuda_graphs import GraphedRunner
from engine.kv_cache import KVCache
from engine.runner import ModelRunner
from engine.sampling_params import namespace_of
from engine.slots import OutOfSlots

Int32 = NDArray[np.int32]

CATCH_UP_ROWS = 512
# Best next tokens kept of every node computed, at least: what is drafted ahead needs alternatives.
LEAST_CHOICES = 2


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
        num_parameters: int = 0,
        on_device: bool | None = None,
        layer_graphs: bool = True,
    ) -> None:
        """A drafter on `runner`, whose KV slots it takes over.

        Args:
            runner: the model.
            max_depth, max_width: bounds of every plan; larger plans are cut down to them.
            catch_up_rows: most rows in one catch-up forward, which bounds memory on long prompts.
            prefix_sharing: whether requests share KV of equal prefixes.
            num_parameters: of the model, if known.
            on_device: whether trees grow where the model runs, which then never waits for the host to choose
                a layer (see `drafters.device_draft`); None for where that is not the CPU. Never with a
                runner that cannot be given rows by its device.
            layer_graphs: whether layers grown there are captured, where they can be (see
                `drafters.layer_graphs`).
        """
        self._model = NextTokens(runner)
        if on_device is None:
            on_device = self._model.device.type != "cpu"
        self._on_device = on_device and self._model.takes_rows
        self._graphs: LayerGraphs | None = None
        if layer_graphs and self._on_device and isinstance(runner, GraphedRunner) and runner.moves_rows:
            self._graphs = LayerGraphs(runner)
        self._kv = KVCache(runner.num_slots, prefix_sharing=prefix_sharing)
        self._held: dict[str, Held] = {}  # least recently used first
        self._catch_up_rows = catch_up_rows
        self._in_call: set[str] = set()
        self._ahead: DraftAhead | None = None
        self._ahead_until = 0.0
        self._capabilities = Capabilities(
            kind="model",
            max_depth=max_depth,
            max_width=max_width,
            has_probabilities=True,
            needs_prefill=True,
            vocab_size=runner.shape.vocab_size,
            max_tokens=runner.shape.max_tokens,
            num_slots=runner.num_slots,
            num_parameters=num_parameters,
        )

    @property
    def capabilities(self) -> Capabilities:
        """What this drafter can do."""
        return self._capabilities

    @property
    def free_slots(self) -> int:
        """KV slots that no open request holds."""
        return self._kv.free_slots

    def warm_up(self) -> None:
        """Capture the layers that most calls need, where they can be; before the first request."""
        if self._graphs is not None:
            self._graphs.capture_usual()

    def draft(self, call: DraftCall) -> DraftResult:
        """Draft for every item of the call.

        A request not held at the position named goes to `unknown`. A tree may be smaller than planned:
        at the end of the model's context, of the request's `max_tokens`, after stop tokens, for lack of
        KV slots, or because the request holds or names a token of a target's larger vocabulary. The layer
        that falls below the plan's `stop_logp` is the last one of its tree. For what `logp` means to
        sampling requests see `drafters.next_tokens`.
        """
        started = perf_counter()
        self._ahead = None  # also where the tree stays the same: its spare slots may be another's from now on
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
            behind = [job for job in ready if not job.tree.is_computed(ROOT)]
            device = DeviceDraft(ready, self._model, self._kv, self._graphs) if self._on_device else None
            if device is not None:
                device.catch_up(behind, self._catch_up_rows)
            else:
                catch_up(behind, self._model, self._kv, self._catch_up_rows)
            for job in ready:
                if job.opened:
                    self._kv.publish(job.request_id, job.held.tokens)
                job.held.tree = job.tree
                job.slots = self._reserve_layers(job)
            if device is not None:
                device.begin(ready)
                device.settle()
                grow(ready, device.compute, call.stop_rule)
            else:
                grow(ready, partial(compute, model=self._model, kv=self._kv), call.stop_rule)
            close_windows((window for window, _ in windows), self._capabilities.vocab_size)
        if call.ahead_s:
            self._ahead = DraftAhead(ready, self._capabilities.max_tokens)
            self._ahead_until = perf_counter() + call.ahead_s
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

    def draft_ahead(self) -> bool:
        """One forward of likely continuations of what was drafted last (see `drafters.draft_ahead`)."""
        if self._ahead is None:
            return False
        if perf_counter() >= self._ahead_until:
            self._ahead = None
            return False
        batch = [
            (job, nodes)
            for job, nodes in self._ahead.next_nodes()
            if len(job.slots) >= len(nodes) or self._reserve_more(job, len(nodes))
        ]
        if not batch:
            self._ahead = None
            return False
        try:
            with torch.inference_mode():
                compute(batch, self._model, self._kv)
        except BaseException:
            for job, _ in batch:  # some of its slots have no keys and values, and must not be committed
                self._drop_slots(job.request_id, job.tree)
            raise
        return True

    def _reserve_more(self, job: Job, rows: int) -> bool:
        """Make `job.slots` hold at least `rows`, from free slots only; False if there are too few."""
        try:
            more = self._kv.reserve(job.request_id, rows - len(job.slots))
        except OutOfSlots:
            return False
        job.slots = np.concatenate((job.slots, more))
        return True

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
            held.is_foreign = item.spec.sampling.largest_token >= self._capabilities.vocab_size
        elif held is not None:
            del self._held[request_id]
        else:
            return None
        self._held[request_id] = held  # now the most recently used
        tree, held.tree = held.tree, None
        follows = kept == len(held.tokens)
        if not follows:
            held.roll_back(kept)
        held.tokens += new
        held.is_foreign = held.is_foreign or max(new, default=0) >= self._capabilities.vocab_size
        plan, root = fit_plan(item.plan, held, self._capabilities), held.tokens[-1]
        num_choices = max(plan.width, LEAST_CHOICES)
        job = Job(request_id, held, Beam(root, plan, held.stops), ComputedTree(root, num_choices))
        if request_id in self._kv:
            if follows and tree is not None:
                self._follow(job, tree, new)
            self._kv.discard(request_id, job.tree.slots)
            if not follows and self._kv.length(request_id) > kept:
                self._kv.truncate(request_id, kept)
        return job

    def _follow(self, job: Job, tree: ComputedTree, new: list[int]) -> None:
        """Walk the tree along the newly committed tokens: score them, keep what is computed below them."""
        followed = tree.follow(new)
        job.num_scored += followed.scored
        job.held.scored += followed.scored
        job.num_agreed += followed.agreed
        if not tree.has_slots:
            return
        path, root = followed.path, followed.node
        if root != NONE and tree.is_computed(root) and tree.num_choices >= job.tree.num_choices:
            job.tree = tree.subtree(root) if new else tree
        elif path and path[-1] == root:
            path = path[:-1]  # forwarded once more: its logits are needed, at this plan's width
        if path:
            slots = np.array([tree.slot[node] for node in path], dtype=np.int32)
            self._kv.commit(job.request_id, slots)

    def _prepare(self, job: Job) -> bool:
        """Reserve the slots that catching up needs; False if the item must do without drafting."""
        request_id, tokens = job.request_id, job.held.tokens
        if len(tokens) > self._capabilities.max_tokens or job.held.is_foreign:
            if request_id in self._kv:
                self._kv.release(request_id)
            return False
        if request_id not in self._kv:
            shared = self._kv.open(request_id, tokens, namespace_of(job.held.spec.cache_salt))
            if shared and shared == len(tokens) - 1 >= job.held.spec.prompt_len:
                self._kv.truncate(request_id, shared - 1)  # who scores nothing seems unable to follow
            job.opened = True
        elif self._kv.length(request_id) == len(tokens) and not job.tree.is_computed(ROOT):
            self._kv.truncate(request_id, len(tokens) - 1)  # asked again: the root's logits are needed
        job.done = self._kv.length(request_id)
        slots = self._reserve(request_id, len(tokens) - job.done)
        if slots is None:
            return False
        job.slots = slots
        job.held.begin()
        if job.tree.is_computed(ROOT):
            job.held.caught_up()
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
            tree = self._held[other].tree
            if tree is not None and tree.has_slots:
                self._drop_slots(other, tree)
        if self._kv.free_slots + sum(self._kv.length(other) for other in idle) >= n:
            for other in idle:
                if self._kv.free_slots >= n:
                    break
                self._forget(other)
        try:
            return self._kv.reserve(request_id, n)
        except OutOfSlots:
            return None

    def _drop_slots(self, request_id: str, tree: ComputedTree) -> None:
        """Give up what is computed beyond the last token heard, but for what it says of the next ones."""
        self._kv.discard(request_id)
        tree.has_slots = False

    def _forget(self, request_id: str) -> None:
        """Drop a request; its committed KV stays as shared prefix until the slots are needed."""
        held = self._held.pop(request_id, None)
        if held is not None:
            held.tree = None  # nor is it drafted ahead for
        if request_id in self._kv:
            if held is not None:
                self._kv.publish(request_id, held.tokens)
            self._kv.release(request_id)
