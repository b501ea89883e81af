"""What became of the items of a call: their verdicts, and the rows whose KV is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verifier.launching import Launched
from verifier.messages import Verdict
from verifier.planning import Planned
from verifier.proposing import Read
from verifier.verdicts import verdict_of


@dataclass(frozen=True, slots=True, eq=False)
class Decided:
    """What became of one planned item.

    Attributes:
        verdict: None if nothing is decided yet.
        kept: rows of its segment whose KV is kept, ascending.
        row: of the forward's kept rows, the one that decided the last token.
    """

    verdict: Verdict | None
    kept: list[int]
    row: int = -1


def rows_read(planned: Planned, decided: Decided, first: int) -> Read:
    """The rows kept of an item whose rows begin at `first` of the forward, and the token after each."""
    segment, verdict = planned.segment, decided.verdict
    kept = np.array(decided.kept, dtype=np.int32)
    if verdict is not None and verdict.tokens:
        last = verdict.tokens[-1]
    else:  # nothing was decided: what is known of the prompt goes on
        last = planned.state.tokens[int(segment.positions[kept[-1]]) + 1]
    return Read(
        request_id=planned.state.request_id,
        rows=kept + np.int32(first),
        tokens=np.append(segment.tokens[kept[1:]], np.int32(last)),
        positions=segment.positions[kept],
        slots=segment.slots[kept],
        past=segment.past,
        is_prompt=planned.is_prefill,
    )


def decided_of(planned: Sequence[Planned], launched: Launched) -> list[Decided]:
    """What became of each planned item; waits for the device."""
    tokens, gaps = launched.fetch()
    decided: list[Decided] = []
    first = 0
    for p in planned:
        context = list(range(p.num_context))
        if p.tree is None:
            decided.append(Decided(None, context))
            continue
        end = first + len(p.tree)
        failure = launched.failures.get(p.state.request_id)
        if failure is not None:
            decided.append(Decided(failure, context))
            first = end
            continue
        verdict, path = verdict_of(p, p.tree, tokens[first:end], gaps[first:end], launched.logits, first)
        last = first + path[-1] if path else first
        decided.append(Decided(verdict, context + [p.num_context + node for node in path], last))
        first = end
    return decided
