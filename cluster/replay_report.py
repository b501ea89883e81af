"""A replay in words: one line per step, differences below it, and two policies side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from cluster.decisions import RequestDecision
from cluster.replay import ReplayedStep
from drafters.messages import DraftPlan


def describe(step: ReplayedStep) -> Iterator[str]:
    """Lines about one step."""
    record = step.record
    num_drafting = sum(one.plan is not None and one.plan.depth > 0 for one in record.requests)
    num_selected = sum(len(one.nodes) - 1 for one in record.requests)
    verdict = "same" if step.is_same else "DIFFERENT"
    yield (
        f"step {record.step}: {verdict} ({len(record.requests)} requests, {num_drafting} drafted for, "
        f"{num_selected} draft tokens selected)"
    )
    for one in step.differences:
        yield f"  {one.what} of {one.subject}"
        yield f"    - recorded: {one.recorded}"
        yield f"    + replayed: {one.replayed}"


@dataclass(slots=True)
class Tally:
    """Sums over a record for one policy."""

    plans: int = 0
    drafting: int = 0
    depth: int = 0
    width: int = 0
    selections: int = 0
    selected: int = 0
    expected: float = 0.0
    verify_s: float = 0.0
    whole_s: float = 0.0
    accepted: int = 0

    def plan(self, plan: DraftPlan) -> None:
        """One request's shape."""
        self.plans += 1
        if plan.depth > 0:
            self.drafting += 1
            self.depth += plan.depth
            self.width += plan.width

    def select(self, step: ReplayedStep, nodes: dict[int, list[int]]) -> None:
        """One selection: nodes by index of the request, roots included."""
        if step.context is None or not nodes:
            return
        chosen = [(step.record.requests[place], mine) for place, mine in nodes.items()]
        num_tokens = sum(len(mine) for _, mine in chosen)
        verify_s = step.context.cost.verify_seconds(
            len(chosen), num_tokens, sum(one.request.num_context for one, _ in chosen), drafted=True
        )
        self.selections += 1
        self.selected += num_tokens - len(chosen)
        self.expected += sum(_expected(one, mine) for one, mine in chosen)
        self.verify_s += verify_s
        self.whole_s += verify_s + step.context.draft_s + step.context.draft_overhead_s
        self.accepted += sum(len(set(one.accepted) & set(mine)) for one, mine in chosen)

    def rows(self) -> list[str]:
        """Values of `Comparison.ROWS`."""
        return [
            f"{self.drafting} of {self.plans}",
            _mean(self.depth, self.drafting),
            _mean(self.width, self.drafting),
            _mean(self.selected, self.selections),
            _mean(self.expected, self.selections),
            _mean(1e3 * self.verify_s, self.selections),
            _mean(self.expected, self.whole_s),
            str(self.accepted),
        ]


@dataclass(slots=True)
class Comparison:
    """What was recorded beside what was replayed.

    Attributes:
        recorded, replayed: sums.
        num_steps, num_different: steps seen, and those where any decision differs.
    """

    recorded: Tally = field(default_factory=Tally)
    replayed: Tally = field(default_factory=Tally)
    num_steps: int = 0
    num_different: int = 0

    ROWS = (
        "requests drafted for",
        "mean depth planned",
        "mean width planned",
        "draft tokens selected per step",
        "expected tokens per step",
        "predicted ms of verification",
        "expected tokens per second",
        "tokens known to be accepted",
    )

    def add(self, step: ReplayedStep) -> None:
        """Count one step."""
        self.num_steps += 1
        self.num_different += not step.is_same
        for place, plan in step.plans.items():
            recorded = step.record.requests[place].plan
            if recorded is not None:
                self.recorded.plan(recorded)
                self.replayed.plan(plan)
        self.recorded.select(step, {place: step.record.requests[place].nodes for place in step.nodes})
        self.replayed.select(step, step.nodes)

    def table(self) -> list[tuple[str, str, str]]:
        """Rows of name, recorded value and replayed value."""
        return list(zip(self.ROWS, self.recorded.rows(), self.replayed.rows(), strict=True))


def _expected(decision: RequestDecision, nodes: list[int]) -> float:
    """Tokens the request gets: its bonus token, and each node by its chance of acceptance."""
    acceptance = decision.acceptance or []
    return 1.0 + sum(acceptance[node] for node in nodes[1:] if node < len(acceptance))


def _mean(total: float, count: float) -> str:
    return f"{total / count:.2f}" if count else "-"
