"""Greedy outputs that should be equal and are not: kept while engines are measured, judged afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from benchmarks import tables
from benchmarks.engine_under_test import Task, same_text

if TYPE_CHECKING:
    from benchmarks.transformers_engine import Reference


Judged = dict[str, Any]
"""A `benchmarks.near_ties.Difference`, and whose output it is (`engine`)."""


@dataclass(slots=True)
class GreedyDifferences:
    """Outputs compared by whose they are, and those that differ.

    Attributes:
        end_tokens: that end an output.
        num_outputs: by whose they are.
    """

    end_tokens: Sequence[int]
    num_outputs: dict[str, int] = field(default_factory=dict)
    _held: list[tuple[str, Task, list[int], list[int]]] = field(default_factory=list)

    @property
    def num_different(self) -> dict[str, int]:
        """Outputs that differ, by whose they are."""
        held = Counter(name for name, *_ in self._held)
        return {name: held[name] for name in self.num_outputs}

    def compare(
        self, name: str, tasks: Sequence[Task], expected: Sequence[list[int]], found: Sequence[list[int]]
    ) -> None:
        """Compare outputs of the same tasks; one that is missing differs."""
        for place, (first, second) in enumerate(zip_longest(expected, found)):
            if first is None or second is None or not same_text(first, second, self.end_tokens):
                self._held.append((name, tasks[place], first or [], second or []))
        self.num_outputs[name] = self.num_outputs.get(name, 0) + len(expected)

    def judge(self, reference: Callable[[], Reference]) -> list[Judged]:
        """Each difference, whose it is, and whether it is shown to be a near tie of the target (`proven`).

        The target's scores are recomputed in plain Transformers, so `reference` is called only if something
        differs.
        """
        if not self._held:
            return []
        from benchmarks.near_ties import explain
        from engine.sampling_params import SamplingParams

        target = reference()
        judged = []
        for number, (name, task, expected, found) in enumerate(self._held):
            params = SamplingParams(
                temperature=0.0, max_tokens=task.max_tokens, stop_token_ids=tuple(self.end_tokens)
            )
            difference = explain(
                target, params, task.tokens, expected, found, index=number, domain=task.domain
            )
            judged.append({"engine": name, **asdict(difference)})
        return judged


def print_differences(judged: Sequence[Judged], num_outputs: int, against: str) -> None:
    """Whether outputs are equal, and if not, whether rounding explains it."""
    if not judged:
        tables.console.print(f"All {num_outputs} outputs equal {against}.")
        return
    unproven = sum(not one["proven"] for one in judged)
    colour = "red" if unproven else "yellow"
    names = ", ".join(sorted({one["engine"] for one in judged}))
    tables.console.print(
        f"[{colour}]{len(judged)} of {num_outputs} outputs differ from {against} ({names}), "
        f"{unproven} of them not at a near tie.[/{colour}]"
    )
