"""Which phase of a selection chose which nodes: noted while somebody traces, else not at all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import ParamSpec

import numpy as np
from numpy.typing import NDArray

from cluster.forest import Forest

Bool = NDArray[np.bool_]
Parameters = ParamSpec("Parameters")

# Name of the only phase of a policy that has none, and of what it chooses beside its phases.
ONE_PHASE = "selected"


@dataclass(slots=True)
class SelectionTrace:
    """What the phases of one selection were given and chose.

    Attributes:
        phases: in order, name and bool [nodes]: everything chosen once that phase was over.
        budget: tokens of the verify step the phases had to keep to; None if they were given none.
        required: float64 [requests], tokens each request was to get in this step; None without an SLO phase.
    """

    phases: list[tuple[str, Bool]] = field(default_factory=list)
    budget: int | None = None
    required: NDArray[np.float64] | None = None


_trace: ContextVar[SelectionTrace | None] = ContextVar("selection trace", default=None)


@contextmanager
def tracing() -> Iterator[SelectionTrace]:
    """The phases run within are noted in the trace it yields."""
    trace = SelectionTrace()
    token = _trace.set(trace)
    try:
        yield trace
    finally:
        _trace.reset(token)


def is_tracing() -> bool:
    """Whether phases are noted."""
    return _trace.get() is not None


def phase(name: str) -> Callable[[Callable[Parameters, Bool]], Callable[Parameters, Bool]]:
    """Marks a phase: a function that returns the nodes chosen so far, its own included.

    Its arguments `budget` and `required`, where it has them, are noted too.
    """

    def mark(function: Callable[Parameters, Bool]) -> Callable[Parameters, Bool]:
        signature = inspect.signature(function)

        @wraps(function)
        def traced(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Bool:
            chosen = function(*args, **kwargs)
            trace = _trace.get()
            if trace is not None:
                given = signature.bind(*args, **kwargs).arguments
                trace.phases.append((name, chosen.copy()))
                trace.budget = given.get("budget", trace.budget)
                trace.required = given.get("required", trace.required)
            return chosen

        return traced

    return mark


def noted_budget(budget: int) -> int:
    """The same, noted as the budget of the selection being traced."""
    trace = _trace.get()
    if trace is not None:
        trace.budget = budget
    return budget


def chosen_by_phase(
    forest: Forest, selected: Sequence[NDArray[np.int32]], trace: SelectionTrace
) -> list[dict[str, list[int]]]:
    """Per request, the drafted nodes that each phase chose, among those selected in the end."""
    left = np.zeros(forest.num_nodes, dtype=np.bool_)
    for start, nodes in zip(forest.roots.tolist(), selected, strict=True):
        left[start + nodes] = True
    left[forest.roots] = False
    found: list[dict[str, list[int]]] = [{} for _ in selected]

    def note(name: str, chosen: Bool) -> None:
        for phases, nodes in zip(found, forest.chosen_nodes(chosen), strict=True):
            if len(nodes):
                phases[name] = nodes.tolist()

    for name, chosen in trace.phases:
        if len(chosen) == len(left):  # else it was about other trees
            note(name, left & chosen)
            left &= ~chosen
    note(ONE_PHASE, left)
    return found
