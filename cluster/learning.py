"""What is learnt from an answer of the target, before it changes any request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.batching.micro_batches import MicroBatches
from cluster.batching.pace import Pace
from cluster.cost_model import CostModel
from cluster.forecast import Forecast
from cluster.planning import StepPlanner
from cluster.requests import Request
from cluster.verify_calls import OutstandingVerify
from verifier.messages import VerifyResult


@dataclass(slots=True)
class Learning:
    """Tells those that learn from answers: how long forwards and iterations take, and what drafts bring."""

    cost: CostModel
    planner: StepPlanner
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
        self.planner.totals.count_step(result)
        self.forecast.verified(result, running.values(), now)
        self.cost.observe_call(sent.parts, result.forward_seconds)
        self.pace.verified(result, sent.trees, requests)
        self.planner.learn(result, sent.trees, requests)
        iteration = self.micro_batches.verified(result, sent, len(running), now)
        if iteration is not None:
            self.planner.prompts.took_s = sent.parts.prompts_s
            self.pace.iterated(iteration.elapsed_s - result.forward_seconds)
            self.planner.measure_iteration(iteration, result, was_ahead=sent.was_ahead)

            def own_s(request_id: str) -> float:
                return iteration.elapsed_s - self.micro_batches.waited_s(request_id, iteration)

            self.planner.tell_selector(result, sent.trees, requests, own_s)
