"""Who may in at the door, how much room there is, and who gives way when the KV pool is full."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from cluster.config import FlotillaConfig
from cluster.cost_model import CostModel
from cluster.events import VerifierReady
from cluster.requests import PREFILL, Request
from cluster.shared_prompts import num_shared
from cluster.stream_messages import Rejected, Submit
from cluster.tier_config import TierConfig

# Slots kept free of sequences, so that even a lone request has room for its draft tree.
SLOT_MARGIN = 40
# Slots of growth set aside per running request before another is admitted.
GROWTH_RESERVE = 16
#: Why requests are refused: every code there is.
CODES = frozenset(
    {
        "queue_full",
        "saturated",
        "not_ready",
        "draining",
        "slo_infeasible",
        "prompt_too_long",
        "empty_prompt",
        "bad_token",
        "unknown_adapter",
        "duplicate_id",
    }
)


class CellState(Protocol):
    """What admission reads of the scheduler."""

    config: FlotillaConfig
    cost: CostModel
    requests: dict[str, Request]
    waiting: list[Request]
    verifier: VerifierReady | None
    limits: VerifierReady | None
    is_draining: bool

    @property
    def max_model_tokens(self) -> int:
        """Longest sequence served."""
        ...


class RunningCell(CellState, Protocol):
    """The same, and who runs."""

    running: dict[str, Request]
    free_slots: int


def check(submit: Submit, cell: CellState) -> Rejected | None:
    """Why a request cannot be served at all; None if it can (`door.Door` decides on whether it is)."""
    if submit.request_id in cell.requests:
        return _reject(submit, "duplicate_id", "a request with this id is already being served")
    if cell.is_draining:
        return draining(submit)
    if cell.verifier is None and not cell.requests:
        return _reject(submit, "not_ready", "the target model is starting", retry_after_s=5.0)
    if not submit.prompt:
        return _reject(submit, "empty_prompt", "the prompt has no tokens")
    if submit.adapter and submit.adapter not in [one.name for one in cell.config.target.adapters]:
        return _reject(submit, "unknown_adapter", f"no adapter `{submit.adapter}` for `model` here")
    if cell.limits is not None:
        if max(submit.prompt) >= cell.limits.vocab_size or min(submit.prompt) < 0:
            message = f"prompt token ids must be in 0..{cell.limits.vocab_size - 1}"
            return _reject(submit, "bad_token", message)
        if len(submit.prompt) >= cell.max_model_tokens:
            return too_long(submit, cell)
    tpot_ms = submit.objective.tpot_ms
    if tpot_ms is not None and not submit.output:  # else a cell has begun it: it is brought to its end
        # What was learnt of a busy machine says nothing of what it can do.
        alone_s = min(cell.cost.verify_seconds(1, 1, 0), cell.cost.profile.target.seconds(1, 1, 0))
        best_ms = 1e3 * alone_s / (cell.config.policy.deepest + 1)
        if tpot_ms < best_ms:
            message = (
                f"slo.tpot_ms {tpot_ms:g} is below {best_ms:.2f} ms, the least this model can reach "
                "on this machine even if every draft token were accepted"
            )
            return _reject(submit, "slo_infeasible", message)
    return None


def draining(submit: Submit) -> Rejected:
    """The answer of a cell that is being removed; another serves the request from where it is."""
    return _reject(submit, "draining", "the cell is being removed", retry_after_s=1.0)


def too_long(submit: Submit, cell: CellState) -> Rejected:
    """The answer to a prompt that leaves no room for a token of output."""
    # Clients know it by OpenAI's words, as where front ends refuse it (`deployments/sampling_mapping.py`).
    message = (
        f"This model's maximum context length is {cell.max_model_tokens} tokens. However, the prompt has "
        f"{len(submit.prompt)}, and a token of output must fit as well. Please reduce the prompt's length."
    )
    if cell.limits is not None and cell.max_model_tokens < cell.limits.max_tokens:
        message += f" (The model takes {cell.limits.max_tokens}; the KV pool of this server holds no more.)"
    return _reject(submit, "prompt_too_long", message)


def _reject(submit: Submit, code: str, message: str, retry_after_s: float | None = None) -> Rejected:
    return Rejected(request_id=submit.request_id, code=code, message=message, retry_after_s=retry_after_s)


def _reserve(request: Request) -> int:
    """Slots a running request will still need soon."""
    if request.state in PREFILL:
        return GROWTH_RESERVE + request.num_tokens - request.num_computed
    return GROWTH_RESERVE


def given_back(request: Request, cell: RunningCell) -> int:
    """Slots that are free with the next call once this running request is preempted, at most.

    What others share of its prompt stays: there is no less in use than whoever has most of them has.
    """
    num_slots = 0 if cell.limits is None else cell.limits.num_slots
    others = [one.num_computed for one in cell.running.values() if one is not request]
    in_use = num_slots - cell.free_slots
    return max(0, min(request.num_computed, in_use - max(others, default=0)))


@dataclass(slots=True)
class Room:
    """Places and KV slots left beside the running requests, kept while some are admitted or preempted.

    Attributes:
        places: requests that may yet be admitted.
        slots: left for those.
        is_empty: whether nobody runs.
        sharing: running requests whose prompts others may share.
    """

    places: int
    slots: int
    is_empty: bool
    sharing: list[Request] = field(default_factory=list)

    @classmethod
    def beside(
        cls, running: Collection[Request], free_slots: int, max_running: int, *, shares_prompts: bool = False
    ) -> Room:
        """Room beside the running requests and what they will still need soon.

        Args:
            running: everybody admitted.
            free_slots: of the target, as last known.
            max_running: requests that may run at once.
            shares_prompts: whether the target keeps a common beginning of prompts once.
        """
        slots = free_slots - GROWTH_RESERVE * len(running)
        for request in running:
            if request.state in PREFILL:
                slots -= request.num_tokens - request.num_computed
        sharing = list(running) if shares_prompts else []
        if slots < 0:  # else it does not matter
            unread = [one for one in sharing if one.state in PREFILL and one.num_computed == 0]
            slots += sum([num_shared(one, sharing) for one in unread])
        return cls(max_running - len(running), slots, not running, sharing)

    def takes(self, request: Request) -> bool:
        """Whether the request fits; with nobody running, whoever passed the door does."""
        return self.is_empty or (self.places > 0 and self.slots >= self._needed(request))

    def take(self, request: Request) -> None:
        """The waiting request is admitted."""
        self.places -= 1
        self.slots -= self._needed(request)
        self.is_empty = False

    def _needed(self, request: Request) -> int:
        """Slots that it takes; what it shares is counted where there is no room for all of it."""
        needed = request.num_tokens + GROWTH_RESERVE
        return needed if self.slots >= needed else needed - num_shared(request, self.sharing)

    def give_back(self, request: Request) -> None:
        """The running request is preempted; what others have of its prompt stays."""
        self.sharing = [one for one in self.sharing if one is not request]
        self.places += 1
        own = max(0, request.num_computed - num_shared(request, self.sharing))
        self.slots += own + _reserve(request)

    def copy(self) -> Room:
        """For trying something out."""
        return Room(self.places, self.slots, self.is_empty, self.sharing)


def slack_s(request: Request, now: float, step_s: float) -> float:
    """Seconds the request is ahead after one more step, of its first token or else of its TPOT objective.

    Infinite without such an objective.
    """
    tpot_ms, ttft_ms = request.pace.tpot_ms, request.pace.ttft_ms
    if request.first_token_at is None:
        return float("inf") if ttft_ms is None else request.arrived + ttft_ms / 1e3 - (now + step_s)
    if tpot_ms is None:
        return float("inf")
    num_decoded = len(request.output) - request.num_resubmitted  # since `first_token_at`
    return num_decoded * tpot_ms / 1e3 - (now - request.first_token_at + step_s)


def victim(
    running: Iterable[Request], now: float, step_s: float, tiers: Mapping[str, TierConfig] | None = None
) -> Request:
    """Who is preempted: of each tenant the least important, then the most slack, then the latest to come.

    Between tenants a priority that a client names says nothing, or each would name the lowest there is: what
    counts is that of its tier, of `tiers`, then as among its own.
    """
    of_tier, own = tiers or {}, dict[str, Request]()
    for one in running:
        label = one.submit.tenant.label
        other = own.get(label, one)
        own[label] = max(other, one, key=lambda r: (r.submit.priority, slack_s(r, now, step_s), r.order))

    def rank(request: Request) -> tuple[int, float, int]:
        tier = of_tier.get(request.submit.tier)
        return (tier.priority if tier else 0, slack_s(request, now, step_s), request.order)

    return max(own.values(), key=rank)
