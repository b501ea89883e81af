"""What drafters without a model have in common: what they hold of each request, and the frame of a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import perf_counter
from typing import Generic, TypeVar

from drafters.heard import Heard, fit_plan, news
from drafters.messages import Draft, DraftCall, DraftItem, DraftPlan, DraftResult
from drafters.protocol import Capabilities
from engine.sampling_params import RequestSpec

HeldT = TypeVar("HeldT", bound=Heard)
#: What one item of a call is drafted from, until all items are read.
BegunT = TypeVar("BegunT")


class ModellessDrafter(ABC, Generic[HeldT, BegunT]):
    """Takes in what each item says of its request, then drafts for those it knows."""

    def __init__(self, capabilities: Capabilities) -> None:
        """A drafter that knows no request yet."""
        self._capabilities = capabilities
        self._held: dict[str, HeldT] = {}

    @property
    def capabilities(self) -> Capabilities:
        """What this drafter can do."""
        return self._capabilities

    def draft(self, call: DraftCall) -> DraftResult:
        """Draft for every item of the call; a request not held at the position named goes to `unknown`."""
        started = perf_counter()
        ended = [self._held.pop(request_id) for request_id in call.release if request_id in self._held]
        self._released(ended)
        begun: list[BegunT] = []
        unknown: list[str] = []
        for item in call.items:
            held = self._held.get(item.request_id)
            change = news(held, item)
            if change is not None and item.spec is not None:
                held = self._held[item.request_id] = self._open(item.spec, held)
            if change is None or held is None:
                unknown.append(item.request_id)
                continue
            num_scored, num_agreed = self._read(held, *change)
            plan = fit_plan(item.plan, held, self._capabilities)
            begun.append(self._begin(item, held, plan, num_scored, num_agreed))
        drafts = self._drafts(call, begun)
        elsewhere_s = self._seconds_elsewhere(call)
        return DraftResult(
            call_id=call.call_id,
            drafts=drafts,
            unknown=unknown,
            seconds=perf_counter() - started + elsewhere_s,
            forward_seconds=elsewhere_s,
            num_forwards=1 if elsewhere_s else 0,
        )

    def draft_ahead(self) -> bool:
        """Nothing: drafting costs next to nothing."""
        return False

    @abstractmethod
    def _open(self, spec: RequestSpec, before: HeldT | None) -> HeldT:
        """A request with no tokens read yet; `before` is what was held of it, if it is opened again."""

    @abstractmethod
    def _read(self, held: HeldT, kept: int, new: list[int]) -> tuple[int, int]:
        """Take in `new` tokens after the first `kept`; how many were scored, and how many agreed."""

    @abstractmethod
    def _begin(
        self, item: DraftItem, held: HeldT, plan: DraftPlan, num_scored: int, num_agreed: int
    ) -> BegunT:
        """Draft for one item, or prepare it; its request has been read, later items' have not."""

    @abstractmethod
    def _drafts(self, call: DraftCall, begun: Sequence[BegunT]) -> list[Draft]:
        """The drafts of all items that were begun, in their order."""

    def _released(self, ended: Sequence[HeldT]) -> None:
        """These requests have ended; called once in every call, before its items are read."""

    def _seconds_elsewhere(self, call: DraftCall) -> float:
        """Seconds spent for this call in another process, which are the drafter's."""
        return 0.0
