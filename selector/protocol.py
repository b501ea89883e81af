"""What a selector is: it says which drafter serves which request (SPIN section IV). Data and one protocol.

Drafters come as *instances*; the instances (replicas) of one *kind* are one model with the same costs, so
what is learnt is learnt per kind. Time is counted in slots: one verify step of the requests asked about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec


# Structs, not dataclasses: one is made per request and step, and they are made several times faster.
class RequestView(msgspec.Struct, frozen=True, gc=False):
    """A request as a selector sees it.

    Attributes:
        request_id: of the request.
        current: instance that serves it now; empty if none.
        allowed: instances it may use (alive, wished for, long enough); its own where it may stay. One that
            is being drained is allowed to those it serves, and to them it is among `PoolView.drafters`.
        num_prompt: tokens of its prompt.
        num_context: tokens it has now.
        num_remaining: tokens it may still get at most.
        num_steps: verify steps it has been through.
        is_drafting: whether it drafts now; else it only gets a drafter, which reads it until it does.
    """

    request_id: str
    current: str
    allowed: tuple[str, ...]
    num_prompt: int
    num_context: int
    num_remaining: int
    num_steps: int
    is_drafting: bool = True


class DrafterView(msgspec.Struct, frozen=True, gc=False):
    """A drafter instance as a selector sees it.

    Attributes:
        name: of the instance.
        kind: of the instances like it.
        capacity: requests it serves at once (SPIN's B_j).
        load: requests it serves now, those asked about included.
        size: parameters of its model, or whatever else orders kinds by size; 0 for those without a model.
    """

    name: str
    kind: str
    capacity: int
    load: int
    size: int


class StepCosts(Protocol):
    """Seconds, as the cost model has them now."""

    def verify_s(self, num_context: int) -> float:
        """A verify step of one request without drafts."""
        ...

    def token_s(self, num_context: int) -> float:
        """One more verified token."""
        ...

    def layer_s(self, kind: str, num_context: int) -> float:
        """One layer of a chain drafted for one request."""
        ...

    def rebuild_s(self, kind: str, num_tokens: int) -> float:
        """Computing keys and values of so many tokens, as after a switch; 0 where none are kept."""
        ...


@dataclass(frozen=True, slots=True)
class PoolView:
    """The drafters of a cell.

    Attributes:
        drafters: by instance name, those that can take requests.
        costs: seconds.
        max_depth: deepest draft of the policy; 0 where none is ever drafted.
    """

    drafters: Mapping[str, DrafterView]
    costs: StepCosts
    max_depth: int


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """What one verify step brought a request.

    Attributes:
        request_id: of the request.
        kind: of the drafter that served it; empty if none did.
        num_tokens: tokens committed, the bonus token included.
        num_drafted: drafted tokens that were verified.
        seconds: of the iteration, its own drafting included; the wait for others' slower drafters is not,
            for what a request has of a drafter must not depend on whom others draft with.
    """

    request_id: str
    kind: str
    num_tokens: int
    num_drafted: int
    seconds: float


class Selector(Protocol):
    """Assigns requests to drafters and learns from what came of it. Pure: no clock, and noise from a seed.

    Attributes:
        learns_from_steps, learns_from_scores: whether `observe` and `score` do anything; else they need not
            be called.
    """

    @property
    def learns_from_steps(self) -> bool:
        """See above."""
        ...

    @property
    def learns_from_scores(self) -> bool:
        """See above."""
        ...

    def begin(self, request_id: str, prompt: Sequence[int], labels: Sequence[str] = ()) -> None:
        """A request arrived; `labels` say where from (tier, client). Nothing if it is known already."""
        ...

    def assign(self, requests: Sequence[RequestView], pool: PoolView) -> dict[str, str]:
        """Instance for each of the requests; empty for none.

        For those that draft next it is one slot. For others (`is_drafting`: admitted, or their drafter was
        lost) it is none, and nothing will be observed of it; they are asked about again when they draft.
        At most `capacity` requests per instance, those counted in `load` that are not asked about included.
        Called once a step with what is in that step, so it must be cheap where nothing changes.
        """
        ...

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Take in what one verify step brought."""
        ...

    def score(self, request_id: str, kind: str, scored: int, agreed: int) -> None:
        """Of `scored` committed tokens a drafter would have said `agreed` itself, whoever drafted them.

        Estimates that a selector shares with others (`AcceptanceEstimates` passed to its constructor) are fed
        by their owner and not here, so that no score counts twice.
        """
        ...

    def destination(self, request: RequestView, pool: PoolView) -> str:
        """Instance the request would move to next, for its cache to be built in idle time; empty for none.

        SPIN, section IV-C: known while exploring; while exploiting a guess.
        """
        ...

    def forget(self, request_id: str) -> None:
        """A request ended."""
        ...

    def prices(self) -> Mapping[str, float]:
        """Goodput (tokens per second) one more slot of each kind would have brought; empty if not known."""
        ...


@runtime_checkable
class Explores(Protocol):
    """A selector that asks for drafters to be scored on committed tokens without serving the request."""

    def explore(self, request: RequestView, pool: PoolView, *, has_ended: bool) -> str:
        """Instance to be scored on this request in idle time; empty for none.

        Args:
            request: running, or just ended.
            pool: `drafters` are those that are idle and have room.
            has_ended: whether the request is over, so that only later ones profit.
        """
        ...


@runtime_checkable
class BeginsAnew(Protocol):
    """A selector that keeps of its own what drafters brought."""

    def begin_anew(self, kind: str) -> None:
        """A kind has other weights: what it brought before says nothing of it."""
        ...


class MovesOnSchedule:
    """Of a selector that moves requests at slots of its own choice: it is asked for destinations every step.

    A class to inherit, since instances of protocols take 8 microseconds to recognise, in every step.
    """
