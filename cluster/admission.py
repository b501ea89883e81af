"""Who may come in, how prompts are chunked, and who gives way when the KV pool is full."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from cluster.config import FlotillaConfig
from cluster.cost_model import CostModel
from cluster.events import VerifierReady
from cluster.requests import Request, State
from cluster.stream_messages import Rejected, Submit

# Slots kept free of sequences, so that even a lone request has room for its draft tree.
SLOT_MARGIN = 40
# Slots of growth set aside per running request before another is admitted.
GROWTH_RESERVE = 16
# Waiting time suggested to a client that finds the queue full, per queued request.
RETRY_S_PER_WAITING = 0.05


class CellState(Protocol):
    """What admission reads of the scheduler."""

    config: FlotillaConfig
    cost: CostModel
    requests: dict[str, Request]
    waiting: list[Request]
    verifier: VerifierReady | None

    @property
    def max_model_tokens(self) -> int:
        """Longest sequence served."""
        ...


def check(submit: Submit, cell: CellState) -> Rejected | None:
    """Why a request is refused at the door; None if it is not."""
    if submit.request_id in cell.requests:
        return _reject(submit, "duplicate_id", "a request with this id is already being served")
    if cell.verifier is None and not cell.requests:
        return _reject(submit, "not_ready", "the target model is starting", retry_after_s=5.0)
    if len(cell.waiting) >= cell.config.scheduler.max_waiting:
        message = f"{len(cell.waiting)} requests are already waiting"
        retry_after_s = max(1.0, RETRY_S_PER_WAITING * len(cell.waiting))
        return _reject(submit, "queue_full", message, retry_after_s=retry_after_s)
    if not submit.prompt:
        return _reject(submit, "empty_prompt", "the prompt has no tokens")
    if cell.verifier is not None:
        if max(submit.prompt) >= cell.verifier.vocab_size or min(submit.prompt) < 0:
            message = f"prompt token ids must be in 0..{cell.verifier.vocab_size - 1}"
            return _reject(submit, "bad_token", message)
        if len(submit.prompt) >= cell.max_model_tokens:
            message = (
                f"the prompt has {len(submit.prompt)} tokens; with at least one output token "
                f"this model takes {cell.max_model_tokens - 1}"
            )
            return _reject(submit, "prompt_too_long", message)
    tpot_ms = submit.objective.tpot_ms
    if tpot_ms is not None:
        best_ms = 1e3 * cell.cost.verify_seconds(1, 1, 0) / (cell.config.policy.max_depth + 1)
        if tpot_ms < best_ms:
            message = (
                f"slo.tpot_ms {tpot_ms:g} is below {best_ms:.2f} ms, the least this model can reach "
                "on this machine even if every draft token were accepted"
            )
            return _reject(submit, "slo_infeasible", message)
    return None


def _reject(submit: Submit, code: str, message: str, retry_after_s: float | None = None) -> Rejected:
    return Rejected(request_id=submit.request_id, code=code, message=message, retry_after_s=retry_after_s)


def has_room(request: Request, running: Iterable[Request], free_slots: int) -> bool:
    """Whether the KV pool takes the request beside what running ones will still need soon."""
    reserved = 0
    for other in running:
        reserved += GROWTH_RESERVE
        if other.state in (State.PREFILLING, State.PREFILL_SENT):
            reserved += other.num_tokens - other.num_computed
    return free_slots - reserved >= request.num_tokens + GROWTH_RESERVE


def prefill_chunks(prefilling: Iterable[Request], budget: int) -> list[tuple[Request, int]]:
    """Chunked prefill (Sarathi): at most `budget` prompt tokens in this step, first come first served."""
    chunks = []
    for request in prefilling:
        if budget <= 0:
            break
        # The last known token is the root of the first tree; it is computed with the final chunk.
        tokens = min(budget, max(1, request.num_tokens - request.num_computed))
        chunks.append((request, tokens))
        budget -= tokens
    return chunks


def slack_s(request: Request, now: float, step_s: float) -> float:
    """Seconds the request is ahead of its TPOT objective after one more step; infinite without one."""
    tpot_ms = request.submit.objective.tpot_ms
    if tpot_ms is None or request.first_token_at is None:
        return float("inf")
    return len(request.output) * tpot_ms / 1e3 - (now - request.first_token_at + step_s)


def victim(running: Iterable[Request], now: float, step_s: float) -> Request:
    """Who is preempted: the least important, then the most slack, then the latest to come."""
    return max(running, key=lambda r: (r.submit.priority, slack_s(r, now, step_s), r.order))
