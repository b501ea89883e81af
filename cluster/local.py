"""The whole pipeline in one process: the scheduler core with its workers called directly, no Ray.

For tests and benchmarks of the algorithms; users are served by `cluster.cell`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.config import FlotillaConfig
from cluster.cost_model import DEFAULT_PROFILE, CostModel, CostProfile
from cluster.events import (
    Action,
    Draft,
    DraftDone,
    DrafterReady,
    Emit,
    Event,
    Reject,
    RequestArrived,
    Verify,
    VerifyDone,
)
from cluster.pool_drafter import build_pool_drafter
from cluster.profile_file import load_profile
from cluster.recorded_core import make_core
from cluster.stream_messages import Receipt, Submit
from cluster.target import build_target
from drafters.protocol import Drafter
from verifier.messages import TokenLogprobs, VerifyCall


@dataclass(slots=True)
class Completion:
    """What a request got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    receipt: Receipt | None = None


@dataclass(slots=True)
class LocalStats:
    """Seconds spent by whom since the engine was made (or `reset`)."""

    scheduler_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    steps: int = 0


class RequestRejected(ValueError):
    """The scheduler refused a request; the message says why."""


class LocalEngine:
    """Runs batches of requests to completion.

    Args:
        config: the cell; tensor parallelism and the front end's part are ignored.
        profile: costs for the policies; if None those of the configured file, or the built-in defaults.
        drafters: drafters to use instead of building those of the configuration (for tests).
    """

    def __init__(
        self,
        config: FlotillaConfig,
        profile: CostProfile | None = None,
        drafters: dict[str, Drafter] | None = None,
    ) -> None:
        self.config = config
        self.stats = LocalStats()
        self.target = build_target(config.target)
        shape = self.target.runner.shape
        if drafters is None:
            drafters = {
                d.name: build_pool_drafter(d, shape.vocab_size, shape.max_tokens, config.target.path)
                for d in config.drafters
            }
        self.drafters = drafters
        if profile is None and config.profile is not None:
            profile, _ = load_profile(Path(config.profile), config)
        self._profile = profile or DEFAULT_PROFILE
        self._actions: deque[Action] = deque()
        self.use_policy(config)

    def use_policy(self, config: FlotillaConfig) -> None:
        """Start afresh with another policy or scheduler configuration on the same loaded workers."""
        self.config = config
        self.core = make_core(config, CostModel(self._profile))
        capacity = {d.name: d.max_requests for d in config.drafters}
        self._handle(self.target.ready())
        for name, drafter in self.drafters.items():
            self._handle(DrafterReady(name, drafter.capabilities, capacity.get(name, 64)))

    def generate(self, requests: Sequence[Submit]) -> dict[str, Completion]:
        """Run all requests together to their ends.

        Raises:
            RequestRejected: if the scheduler refuses one.
        """
        completions = {request.request_id: Completion() for request in requests}
        for request in requests:
            self._handle(RequestArrived(request, "local"))
        while self._actions:
            self._perform(self._actions.popleft(), completions)
        return completions

    def _handle(self, event: Event) -> None:
        start = time.perf_counter()
        self._actions.extend(self.core.handle(event, start))
        self._actions.extend(self.core.reflect())
        self.stats.scheduler_s += time.perf_counter() - start

    def _next_call(self) -> VerifyCall | None:
        return next((action.call for action in self._actions if isinstance(action, Verify)), None)

    def _perform(self, action: Action, completions: dict[str, Completion]) -> None:
        start = time.perf_counter()
        match action:
            case Draft(name, call):
                result = self.drafters[name].draft(call)
                self.stats.draft_s += time.perf_counter() - start
                self._handle(DraftDone(name, result))
            case Verify(call):
                verified = self.target.calls.answer(call, self._next_call)
                self.stats.verify_s += time.perf_counter() - start
                self.stats.steps += 1
                self._handle(VerifyDone(verified))
            case Emit(_, events):
                for event in events:
                    completion = completions[event.request_id]
                    completion.tokens.extend(event.tokens)
                    completion.logprobs.extend(event.logprobs)
                    completion.prompt_logprobs.extend(event.prompt_logprobs)
                    if event.finish_reason is not None:
                        completion.finish_reason = event.finish_reason
                        completion.receipt = event.receipt
            case Reject(_, rejection):
                raise RequestRejected(f"{rejection.request_id}: {rejection.message}")
