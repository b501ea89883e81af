"""Iterations of a real cell, from the record of its decisions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.fidelity_record import DraftSample, StepSample
from cluster.decisions import RequestDecision, StepRecord, read_entries


def newest_step(lines: bytes) -> int:
    """Number of the last step of a record; -1 if it has none."""
    entries = read_entries(lines.splitlines(keepends=True))
    return max((entry.step for entry in entries if isinstance(entry, StepRecord)), default=-1)


def read_steps(lines: bytes, after: int = -1) -> list[StepSample]:
    """The steps of a record that were seen to their end, from the one `after` that number on."""
    found = []
    for entry in read_entries(lines.splitlines(keepends=True)):
        if isinstance(entry, StepRecord) and entry.step > after:
            sample = step_sample(entry)
            if sample is not None:
                found.append(sample)
    return found


def step_sample(step: StepRecord) -> StepSample | None:
    """One of them; None if part of it is missing."""
    known = step.known if step.select is None else step.select.context
    verified = [one for one in step.requests if one.verified is not None]
    if known is None or not verified or step.verify is None or step.whole is None:
        return None
    if step.verify.profile is None or step.verify.actual is None or step.whole.actual is None:
        return None
    if any(draft.seconds.actual is None for draft in step.drafts):
        return None
    corrections, kinds = known.corrections, known.kinds
    planned = [one for one in verified if one.plan is not None and one.plan.depth]
    drafts = []
    for draft in step.drafts:
        decided = [one for one in verified if one.request.drafter == draft.drafter and one.tree is not None]
        rows = _rows(decided)
        if rows and draft.seconds.actual is not None:
            drafts.append(
                DraftSample(
                    drafter=kinds.get(draft.drafter, draft.drafter),
                    num_requests=draft.num_requests,
                    rows=rows,
                    num_context=sum(one.request.num_context for one in decided),
                    seconds=draft.seconds.actual,
                )
            )
    return StepSample(
        num_requests=len(verified),
        num_tokens=sum(1 + (one.verified or 0) for one in verified),
        num_committed=sum(one.committed or 0 for one in verified),
        profile_s=step.verify.profile,
        decoding_s=step.verify.profile_decoding,
        forward_s=step.verify.actual,
        whole_s=step.whole.actual,
        ahead=step.ahead,
        drafts=drafts,
        # Some are flags, and the record is read again as numbers.
        told={name: float(value) for name, value in known.values.items()}
        | {f"correction of {name}": value for name, value in corrections.items()},
        rates=[one.request.rate for one in planned],
        prompts=[
            (one.profile, one.actual)
            for one in step.prompts
            if one.actual is not None and one.profile is not None
        ],
        depths=[one.plan.depth for one in planned if one.plan is not None],
    )


def _rows(decided: Sequence[RequestDecision]) -> list[int]:
    depths = [one.tree.depth[1:] for one in decided if one.tree is not None]
    if not depths:
        return []
    counts: list[int] = np.bincount(np.concatenate(depths))[1:].tolist()
    return counts
