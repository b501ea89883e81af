"""What a cell tells of its load, for routing and for scaling: counts, and predictions of its cost model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from cluster.admission import Room
from cluster.call_parts import NO_ROWS, chunk_rows
from cluster.chunk_size import chunk_tokens
from cluster.core import SchedulerCore
from cluster.requests import Request, State
from cluster.stream_messages import Objective, TokenEvent
from cluster.totals import Totals

#: Output tokens that requests are taken to have on average until some have ended, or `max_tokens` if that is
#: less; and how many answers that counts for, as short ones are the first to end.
_FIRST_MEAN_OUTPUT, _FIRST_COUNT = 256.0, 7
_SMOOTHING = 0.05
#: Prompt tokens by which the cost of one is judged.
_SAMPLE_TOKENS = 64
#: Seconds over which tokens per second are counted.
_RATE_WINDOW_S = 2.0


class CellStats:
    """Numbers on the state of one cell, by name (`Member.stats`); times in seconds of the scheduler's clock.

    The background (`cluster.batching.background`) gives way to whoever has objectives, so it is no load to
    those: but where its name says so, a number is as if it were not there. Unless cells are to be added for
    it, too (`scaling.cells.for_background`); then nobody counts as the background.

    - `running`, `waiting`: requests decoded and queued; `max_running`: how many may be decoded at once.
    - `background_running`, `background_waiting`: the same of those in the background.
    - `kv_slots`: tokens the KV pool holds; `kv_use`: share of them in use, 0 to 1; `background_kv_use`: share
      beside that which the background has.
    - `queue_s`: predicted delay until a request that came now would begin its prefill;
      `background_queue_s`: until one of the background would.
    - `prefill_s_per_token`: predicted seconds for a token of its prompt.
    - `step_s`: seconds of an iteration; `tpot_s`: predicted seconds per output token with one request more;
      `idle_tpot_s`: predicted for a request alone.
    - `objectives`: requests with objectives that a cell which serves nobody else would meet;
      `attainment`: share of those that are predicted to attain them, 1 without any;
      `objective_tpot_s`: mean of their objectives for the time per token, that of the whole answer shared
      out among its tokens; 0 without any.
    - `tokens_per_s`: committed tokens, over the last seconds.
    """

    def __init__(self) -> None:
        self._mean_output, self._num_ended = _FIRST_MEAN_OUTPUT, 0
        self._committed: deque[tuple[float, int]] = deque()
        self._counted: Totals | None = None

    def ended(self, num_output: int) -> None:
        """A request ended by itself with so many output tokens: what others may be expected to have."""
        self._num_ended += 1
        weight = max(_SMOOTHING, 1.0 / (self._num_ended + _FIRST_COUNT))
        self._mean_output += weight * (num_output - self._mean_output)

    def told(self, events: Iterable[TokenEvent]) -> None:
        """What a front end is told: some requests end with it."""
        for event in events:
            if event.receipt is not None and event.finish_reason != "cancelled":
                self.ended(event.receipt.num_output_tokens)

    def measure(self, core: SchedulerCore, now: float) -> dict[str, float]:
        """The numbers as they are now."""
        everybody, all_waiting = list(core.running.values()), core.waiting
        gives_way = _nobody if core.config.scaling.cells.for_background else core.batcher.gives_way
        running = [request for request in everybody if not gives_way(request)]
        waiting = [request for request in all_waiting if not gives_way(request)]
        num_slots = core.verifier.num_slots if core.verifier is not None else 0
        per_token_s = prefill_seconds(core)
        step_s = core.planner.step_s
        # By loads as low as that: present steps are longer than its own by those of all the others.
        idle_tpot_s = core.door.forecast.alone_tpot_s(drafts=bool(core.pool.drafters))
        num_here = len(running) + sum(map(gives_way, core.batcher.taking_part(everybody)))
        tpot_s = self._predicted_tpot(core, len(running), num_here) if running else idle_tpot_s
        background = [request for request in everybody if gives_way(request)]
        # Those give up their memory where somebody else finds none.
        free_slots = core.free_slots + sum(request.num_computed for request in background)
        queue_s = background_queue_s = self._queue_seconds(
            core, running, waiting, free_slots, per_token_s, tpot_s
        )
        if background or len(all_waiting) > len(waiting):
            # Those before it end at the pace that there is, not at what it would be without the background.
            present_s = self._predicted_tpot(core, num_here, num_here)
            background_queue_s = self._queue_seconds(
                core, everybody, all_waiting, core.free_slots, per_token_s, present_s
            )
        used = 1.0 - core.free_slots / num_slots if num_slots else 0.0
        background_kv_use = 0.0
        if background and used > 0.0:
            # Of prompts that are shared each has all: together more than is in use.
            held = max(used * num_slots, sum(request.num_computed for request in everybody))
            background_kv_use = used * sum(request.num_computed for request in background) / held
        judged = [
            request
            for request in (*running, *waiting)
            if _is_feasible(request, request.num_tokens * per_token_s, idle_tpot_s)
        ]
        # Who waits has that part of the queue before it that its place in it says.
        ahead = {id(request): place / len(waiting) for place, request in enumerate(waiting, start=1)}
        attained = sum(
            self._attains(request, ahead.get(id(request), 1.0) * queue_s, per_token_s, tpot_s, now)
            for request in judged
        )
        tpots = [tpot_ms for request in judged if (tpot_ms := _wanted_tpot_ms(request)) is not None]
        return {
            "running": float(len(running)),
            "waiting": float(len(waiting)),
            "background_running": float(len(background)),
            "background_waiting": float(len(all_waiting) - len(waiting)),
            "max_running": float(core.config.scheduler.max_running),
            "kv_slots": float(num_slots),
            "kv_use": used - background_kv_use,
            "background_kv_use": background_kv_use,
            "queue_s": queue_s,
            "background_queue_s": background_queue_s,
            "prefill_s_per_token": per_token_s,
            "step_s": step_s,
            "tpot_s": tpot_s,
            "idle_tpot_s": idle_tpot_s,
            "attainment": attained / len(judged) if judged else 1.0,
            "objectives": float(len(judged)),
            "objective_tpot_s": sum(tpots) / len(tpots) / 1e3 if tpots else 0.0,
            "tokens_per_s": self._rate(core.totals, now),
        }

    def _predicted_tpot(self, core: SchedulerCore, num_running: int, num_here: int) -> float:
        """Seconds per token with one request more: today's, and what its rows add to a forward.

        Today's steps are of `num_here` requests; those more than `num_running` would sit out.
        """
        pace = core.batcher.pace
        committed = max(1.0, pace.num_committed.value)
        rows = pace.num_rows.value
        added = core.cost.verify_seconds(num_running + 1, round((num_running + 1) * rows), 0)
        added -= core.cost.verify_seconds(num_here, round(num_here * rows), 0)
        step_s = core.planner.step_s
        if num_here > num_running:
            alone_s = core.cost.verify_seconds(1, 1, 0) + pace.beside_s.value
            return min(step_s, max(alone_s, step_s + added)) / committed
        return (step_s + max(0.0, added)) / committed

    def _remaining(self, request: Request) -> float:
        """Output tokens it is expected to get yet."""
        expected = max(self._mean_output - len(request.output), self._mean_output / 4)
        return max(1.0, min(expected, request.num_remaining))

    def _queue_seconds(
        self,
        core: SchedulerCore,
        running: Sequence[Request],
        waiting: Sequence[Request],
        free_slots: int,
        per_token_s: float,
        tpot_s: float,
    ) -> float:
        """Until a request that came now began its prefill: prompts before it, a place among the running."""
        ahead = sum(request.num_tokens for request in waiting)
        for request in running:
            if request.state in (State.PREFILLING, State.PREFILL_SENT):
                ahead += request.num_tokens - request.num_computed
        reading_s = ahead * per_token_s
        places, shares = core.config.scheduler.max_running, core.config.target.prefix_sharing
        if waiting and not Room.beside(running, free_slots, places, shares_prompts=shares).takes(waiting[0]):
            places = min(places, len(running))  # no more find memory
        too_many = len(running) + len(waiting) + 1 - places
        if too_many <= 0 or not running:
            return reading_s
        # Of `n` requests of `length` tokens, begun one after the other, one ends every `length / n` steps.
        length = sum(len(request.output) + self._remaining(request) for request in running) / len(running)
        return max(reading_s, too_many * length * tpot_s / len(running))

    def _attains(
        self,
        request: Request,
        queue_s: float,
        per_token_s: float,
        tpot_s: float,
        now: float,
    ) -> bool:
        """Whether it is predicted to meet its objectives, `e2e_ms` with all of its `max_tokens`.

        `queue_s` is how long those before it take, if it waits.
        """
        objective = request.submit.objective
        if objective.ttft_ms is not None or objective.e2e_ms is not None:
            ttft_s = here_s = now - request.arrived
            if request.first_token_at is not None:
                ttft_s = request.first_token_at - request.arrived
            elif not request.is_running:
                ttft_s += queue_s + request.num_tokens * per_token_s
            else:
                ttft_s += (request.num_tokens - request.num_computed) * per_token_s
            if objective.ttft_ms is not None and ttft_s > objective.ttft_ms / 1e3:
                return False
            e2e_s = max(ttft_s, here_s) + request.num_remaining * tpot_s
            if objective.e2e_ms is not None and e2e_s > objective.e2e_ms / 1e3:
                return False
        return objective.tpot_ms is None or self._final_tpot(request, tpot_s) <= objective.tpot_ms / 1e3

    def _final_tpot(self, request: Request, tpot_s: float) -> float:
        """What its mean time per output token will be at its end."""
        so_far = request.tpot_so_far()
        if so_far is None:
            return tpot_s
        done, left = max(1, len(request.output) - 1 - request.num_resubmitted), self._remaining(request)
        return (so_far * done + tpot_s * left) / (done + left)

    def _rate(self, totals: Totals, now: float) -> float:
        if totals is not self._counted:  # those of another scheduler, as after a change of the policy
            self._counted = totals
            self._committed.clear()
        committed = totals.committed_tokens
        self._committed.append((now, committed))
        while now - self._committed[0][0] > _RATE_WINDOW_S and len(self._committed) > 2:
            self._committed.popleft()
        since, before = self._committed[0]
        return (committed - before) / (now - since) if now > since else 0.0


def _nobody(_: Request) -> bool:
    return False


def _is_feasible(request: Request, prefill_s: float, idle_tpot_s: float) -> bool:
    """Whether it has objectives, and alone on a cell would meet them."""
    objective = request.submit.objective
    if objective == Objective():
        return False
    e2e_s = prefill_s + request.submit.sampling.max_tokens * idle_tpot_s
    if objective.e2e_ms is not None and e2e_s > objective.e2e_ms / 1e3:
        return False
    if objective.ttft_ms is not None and prefill_s > objective.ttft_ms / 1e3:
        return False
    return objective.tpot_ms is None or idle_tpot_s <= objective.tpot_ms / 1e3


def _wanted_tpot_ms(request: Request) -> float | None:
    """What its objectives ask of the time per token."""
    objective = request.submit.objective
    if objective.e2e_ms is None:
        return objective.tpot_ms
    share_ms = objective.e2e_ms / request.submit.sampling.max_tokens
    return share_ms if objective.tpot_ms is None else min(share_ms, objective.tpot_ms)


def prefill_seconds(core: SchedulerCore) -> float:
    """Predicted seconds of the target for one token of a prompt, read in chunks beside nobody else."""
    chunk = min(chunk_tokens(core.config.scheduler, core.cost.profile.target), _SAMPLE_TOKENS)
    return core.cost.call_parts(NO_ROWS, chunk_rows(0, chunk), drafted=False).seconds / chunk
