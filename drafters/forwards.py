"""The forwards of one draft call: catching up on committed tokens, then one forward per tree layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from drafters.computed_tree import ROOT
from drafters.job import Job
from drafters.next_tokens import NextTokens, Ranking, Tokens, Values
from engine.kv_cache import KVCache
from engine.runner import Segment
from engine.stop_rules import Stopping, StopRule

Int32 = NDArray[np.int32]
Missing = Sequence[tuple[Job, list[int]]]
"""Nodes of trees that are to be computed, parents before children."""
Forward = Callable[[Missing], None]


def catch_up(jobs: Sequence[Job], model: NextTokens, kv: KVCache, max_rows: int) -> None:
    """Forward every committed token that has no KV, the root of each tree the last of them.

    Args:
        jobs: their `slots` are reserved.
        model: what is forwarded.
        kv: slot tables; the rows forwarded are committed.
        max_rows: most rows in one forward, so that activations stay bounded on long prompts.
    """
    for reading in readings(jobs, kv, max_rows):
        best = model.best(reading.segments, reading.keep, reading.rankings, reading.num_choices)
        reading.settle(*best)


def readings(jobs: Sequence[Job], kv: KVCache, max_rows: int) -> Iterator[Reading]:
    """The forwards of `catch_up`; each is to be run before the next is asked for."""
    pending = list(jobs)
    while pending:
        reading = Reading()
        for job in pending:
            room = max_rows - reading.num_rows
            if room == 0:
                break
            reading.add(_Part(job, room), kv)
        yield reading
        reading.commit(kv)
        pending = [job for job in pending if job.done < len(job.held.tokens)]


class Reading:
    """One forward of committed tokens: parts of some requests.

    Attributes:
        segments, rankings: as `NextTokens.best` takes them.
        num_rows: forwarded.
    """

    def __init__(self) -> None:
        """Of nothing."""
        self.segments: list[Segment] = []
        self.rankings: list[Ranking | None] = []
        self.num_rows = 0
        self._parts: list[_Part] = []
        self._keep: list[Int32] = []

    def add(self, part: _Part, kv: KVCache) -> None:
        """Take in a part of another request."""
        self.segments.append(part.segment(kv.past(part.job.request_id)))
        first = self.num_rows - part.low
        self._keep.append(np.arange(part.keep_from, part.high, dtype=np.int32) + first)
        self.rankings += part.rankings()
        self.num_rows += part.high - part.low
        self._parts.append(part)

    @property
    def keep(self) -> Int32:
        """int32 [n], rows whose next tokens are wanted."""
        return np.concatenate(self._keep)

    @property
    def num_choices(self) -> int:
        """How many of them, at least."""
        return max(part.job.tree.num_choices for part in self._parts)

    @property
    def roots(self) -> list[tuple[Job, int]]:
        """Jobs that are caught up by this forward, and which of the rows kept is their root's."""
        ends = np.cumsum([len(rows) for rows in self._keep]).tolist()
        return [(part.job, end - 1) for part, end in zip(self._parts, ends, strict=True) if part.reaches_root]

    def commit(self, kv: KVCache) -> None:
        """The forward was run, or is under way: its rows have KV."""
        for part, segment in zip(self._parts, self.segments, strict=True):
            kv.commit(part.job.request_id, segment.slots)
            if part.reaches_root:
                part.job.held.caught_up()

    def settle(self, logp: Values, token: Tokens) -> None:
        """Take in the best next tokens of the rows kept."""
        row = 0
        for part, keep in zip(self._parts, self._keep, strict=True):
            end = row + len(keep)
            part.score(token[row:end])
            if part.reaches_root:
                part.job.tree.learn(ROOT, logp[end - 1], token[end - 1])
            row = end


class _Part:
    """Positions [low, high) of one job's sequence in a catch-up forward; logits from `keep_from` on."""

    __slots__ = ("high", "job", "keep_from", "low")

    def __init__(self, job: Job, room: int) -> None:
        tokens, spec = job.held.tokens, job.held.spec
        self.job = job
        self.low = job.done
        self.high = min(len(tokens), self.low + room)
        # Row p predicts the token at p + 1: wanted if that is an output token to score, or yet to come.
        first_scored = max(job.held.scored, spec.prompt_len)
        self.keep_from = min(max(self.low, min(first_scored, len(tokens)) - 1), self.high)

    @property
    def reaches_root(self) -> bool:
        return self.high == len(self.job.held.tokens)

    def segment(self, past: Int32) -> Segment:
        job, rows = self.job, self.high - self.low
        slots, job.slots = job.slots[:rows], job.slots[rows:]
        job.done = self.high
        return Segment(
            tokens=np.array(job.held.tokens[self.low : self.high], dtype=np.int32),
            positions=np.arange(self.low, self.high, dtype=np.int32),
            slots=slots,
            past=past,
        )

    def rankings(self) -> list[Ranking | None]:
        return [self.job.held.ranking(position) for position in range(self.keep_from, self.high)]

    def score(self, choices: Sequence[Sequence[int]]) -> None:
        """Count how often the first of the `choices` of rows `keep_from` on is the token committed next."""
        held = self.job.held
        actual = held.tokens[self.keep_from + 1 : self.high + 1]  # one short if the root is among the rows
        self.job.num_scored += len(actual)
        self.job.num_agreed += sum(token == best[0] for token, best in zip(actual, choices, strict=False))


def grow(jobs: Sequence[Job], forward: Forward, stop_rule: StopRule | None = None) -> None:
    """Grow all candidate trees to their plans' ends, at most one forward per layer over all of them.

    Args:
        jobs: their roots are computed, and their `slots` are reserved for the rows of the layers; a
            tree ends where its slots do.
        forward: makes nodes computed.
        stop_rule: ends all trees at the layer after which another is predicted not to pay.
    """
    stopping = stop_rule.begin() if stop_rule is not None else None
    for job in jobs:
        job.extend()
    while True:
        missing = []
        for job in jobs:
            nodes = job.missing()
            if len(nodes) > len(job.slots) or (nodes and not job.beam.deserves_forward):
                job.beam.stop()
            elif nodes:
                missing.append((job, nodes))
        active = [job for job in jobs if job.beam.frontier]
        if not active:
            return
        if stopping is not None and not _pays(stopping, jobs, active):
            for job in active:
                job.beam.stop()
            return
        if missing:
            forward(missing)
        for job in active:
            job.extend()
        jobs = active


def compute(missing: Missing, model: NextTokens, kv: KVCache) -> None:
    """One forward of nodes that are not computed, into the first of their jobs' reserved `slots`."""
    segments: list[Segment] = []
    rankings: list[Ranking | None] = []
    num_rows = 0
    for job, nodes in missing:
        slots, job.slots = job.slots[: len(nodes)], job.slots[len(nodes) :]
        past, length = kv.past(job.request_id), len(job.held.tokens)
        segments.append(job.tree.segment(nodes, slots, past, length))
        rankings += [job.held.tree_ranking(job.tree, node) for node in nodes]
        num_rows += len(nodes)
    logp, token = model.best(
        segments,
        np.arange(num_rows, dtype=np.int32),
        rankings,
        max(job.tree.num_choices for job, _ in missing),
    )
    row = 0
    for job, nodes in missing:
        for node in nodes:
            job.tree.learn(node, logp[row], token[row])
            row += 1


def _pays(stopping: Stopping, grown: Sequence[Job], active: Sequence[Job]) -> bool:
    """Put the layer just `grown` into the estimate, and ask whether one more for those `active` raises it."""
    stopping.correct([p for job in grown for p in job.beam.acceptance(job.beam.layer)])
    return stopping.pays([p for job in active for p in job.beam.acceptance(job.beam.frontier)])
