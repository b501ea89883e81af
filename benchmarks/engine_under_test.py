"""What `flotilla bench engine` compares: the seam between the comparison and the engines in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Task:
    """A tokenized prompt to be continued greedily.

    Attributes:
        domain: its class in reports.
        tokens: the prompt.
        max_tokens: most tokens to generate; generation ends earlier at an end token.
    """

    domain: str
    tokens: list[int]
    max_tokens: int


@dataclass(slots=True)
class RunResult:
    """A measured run.

    Attributes:
        seconds: wall time from the first prompt handed over to the last token received.
        outputs: generated tokens by task, with the end token if there was one.
        step_s: time the engine spent in steps, and `scheduler_s`: the part that was selection and
            bookkeeping; both 0 for engines that do not say.
    """

    seconds: float
    outputs: list[list[int]] = field(default_factory=list)
    step_s: float = 0.0
    scheduler_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(output) for output in self.outputs)


class EngineUnderTest(Protocol):
    """Something that continues prompts. An engine is idle between runs and uses no processor then."""

    @property
    def name(self) -> str:
        """Name in tables."""

    @property
    def max_concurrency(self) -> int | None:
        """Most prompts it can work on at once; None for no bound."""

    def run(self, tasks: Sequence[Task], concurrency: int) -> RunResult:
        """Continue all tasks, `concurrency` at a time."""

    def close(self) -> None:
        """Release processes and memory."""


def until_end(output: Sequence[int], max_tokens: int, end_tokens: Sequence[int]) -> list[int]:
    """An output cut after its first end token, and to `max_tokens`."""
    kept = list(output[:max_tokens])
    for place, token in enumerate(kept):
        if token in end_tokens:
            return kept[: place + 1]
    return kept


def same_text(first: Sequence[int], second: Sequence[int], end_tokens: Sequence[int]) -> bool:
    """Whether two outputs are equal apart from a final end token, which some engines keep back."""

    def body(output: Sequence[int]) -> list[int]:
        return list(output[:-1]) if output and output[-1] in end_tokens else list(output)

    return body(first) == body(second)
