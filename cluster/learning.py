"""What is learnt from an answer of the target, before it changes any request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.batching.micro_batches import MicroBatches
from cluster.batching.pace import Pace
from cluster.cost_model import CostModel
from cluster.forecast import Forecast
from cluster.outstanding_verify import OutstandingVerify
from cluster.planned_ahead import PlannedAhead
from cluster.requests import Request
from verifier.messages import VerifyResult


@dataclass(slots=True)
class Learning:
    """Tells those that learn from answers: how long forwards and iterations take, and what drafts bring."""

    cost: CostModel
    planned_ahead: PlannedAhead
    pace: Pace
    micro_batches: MicroBatches
    forecast: Forecast

    def verified(
        self,
        result: VerifyResult,
        sent: OutstandingVerify,
        requests: Mapping[str, Request],
        running: Mapping[str, Request],
        now: float,
    ) -> None:
        """The target answered a call.

        Args:
            result: the answer.
            sent: the call.
            requests: by id, as they were before the answer.
            running: those of them that run.
            now: the scheduler's clock.
        """
        planner = self.planned_ahead.planner
        planner.totals.count_step(result, sent)
        self.forecast.first_chunks.verified(result, sent, running.values())
        self.forecast.verified(result, running.values(), now)
        self.cost.observe_call(sent.parts, result.forward_seconds)
        self.pace.verified(result, sent.trees, requests)
        planner.learn(result, sent.trees, requests)
        self.planned_ahead.score(result, sent, requests)
        iteration = self.micro_batches.verified(result, sent, len(running), now)
        if iteration is not None:
            planner.prompts.took_s = sent.parts.prompts_s
            self.pace.iterated(iteration.elapsed_s - result.forward_seconds)
            planner.measure_iteration(iteration, result)

            def own_s(request_id: str) -> float:
                return iteration.elapsed_s - self.micro_batches.waited_s(request_id, iteration)

            planner.tell_selector(result, sent.trees, requests, own_s)
