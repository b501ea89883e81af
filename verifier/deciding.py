"""What became of the items of a call: their verdicts, and the rows whose KV is kept."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

import msgspec
import numpy as np

from verifier.launching import Launched
from verifier.messages import Verdict
from verifier.planning import Planned
from verifier.proposing import Read
from verifier.verdicts import broken, verdict_of


class Decided(msgspec.Struct, frozen=True, eq=False, gc=False):
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
    segment, verdict, kept = planned.segment, decided.verdict, decided.kept
    n = len(kept)
    # The first ones, as of prompts and chains: views are enough.
    which = slice(n) if kept[-1] == n - 1 else np.array(kept, dtype=np.int32)
    if verdict is not None and len(verdict.tokens) == n:  # of a tree: each decided what comes after it
        tokens = np.array(verdict.tokens, dtype=np.int32)
    else:
        if verdict is not None and verdict.tokens:
            last = verdict.tokens[-1]
        else:  # nothing was decided: what is known of the prompt goes on
            last = planned.state.tokens[int(segment.positions[kept[-1]]) + 1]
        tokens = np.append(segment.tokens[which][1:], np.int32(last))
    return Read(
        request_id=planned.state.request_id,
        rows=np.arange(first, first + n, dtype=np.int32) if isinstance(which, slice) else which + first,
        tokens=tokens,
        positions=segment.positions[which],
        slots=segment.slots[which],
        past=segment.past,
        is_prompt=planned.is_prefill,
    )


def decided_of(planned: Sequence[Planned], launched: Launched) -> list[Decided]:
    """What became of each planned item; waits for the device."""
    tokens, gaps = launched.fetch()
    decided: list[Decided] = []
    first = 0
    failures = launched.failures
    has_nan = any(map(isnan, gaps))
    for p in planned:
        if p.tree is None:
            decided.append(Decided(None, list(range(p.num_context))))
            continue
        end = first + len(p.tree.token)
        failure = failures.get(p.state.request_id) if failures else None
        if failure is not None:
            decided.append(Decided(failure, list(range(p.num_context))))
            first = end
            continue
        verdict, path = verdict_of(p, p.tree, tokens[first:end], gaps[first:end], launched.logits, first)
        if has_nan and any(isnan(gaps[first + node]) for node in path):
            decided.append(Decided(broken(p), list(range(p.num_context))))
            first = end
            continue
        last = first + path[-1] if path else first
        if p.num_context:
            path = [*range(p.num_context), *[p.num_context + node for node in path]]
        decided.append(Decided(verdict, path, last))
        first = end
    return decided
