"""A profile of the cell as it served: `flotilla bench fidelity`'s calibration runs, put into numbers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from benchmarks.fidelity_record import CALIBRATION, DraftSample, FidelityRecord, ServedRun, StepSample
from cluster.cost_model import CostProfile
from cluster.linear_cost import LinearCost
from simulator.acceptance import DraftQuality
from simulator.hardware import DrafterProfile, HardwareProfile, Trips
from simulator.pace import fit_pace

Float64 = NDArray[np.float64]

# Steps that took this many times their median in relation to the fit met something else on the machine.
OUTLIER = 20.0
# Forwards longer than this many of the smallest one take less of what other processes cost: they wait for
# arithmetic, which is their core's own, and small ones for memory, which is shared.
BEND = 4.0
# How strongly the two slopes are taken to be the same where the samples do not tell them apart.
_SAME_SLOPE = 0.03
# How strongly nothing is taken to be fixed where samples of one size do not tell it from a factor.
_NOTHING_FIXED = 0.01
LEAST_SAMPLES = 20
# A plain step among drafted ones takes so much of what those take beside drafting and forwards.
_PLAIN_SHARE = 0.75


class ServedProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What the calibration runs say of time.

    Attributes:
        profile: for the simulator.
        jitter: standard deviation of the logarithm of a forward's time around its fit and the machine's pace.
        factors: of the profile's times that forwards took: of the target without and with drafts in the
            batch, and of each drafter, whose calls take a fixed time besides.
        bend: what goes beyond `BEND` of the target's smallest forwards took so many times the factor.
        fixed_s: what a forward of the target took on top, whatever was in it.
        num_steps: seen.
        error: mean relative difference between an iteration's fitted and real length, positive if the fit is
            longer.
    """

    profile: HardwareProfile
    jitter: float
    factors: dict[str, float]
    fixed_s: float
    bend: float
    num_steps: int
    error: float


def fit_profile(record: FidelityRecord, like: ServedRun | None = None) -> ServedProfile:
    """Factors on the profile's forwards, and what an iteration takes besides them.

    Args:
        record: of a cell.
        like: look at calibration runs of its policy only, and of its load if there are any. None for all.

    Raises:
        ValueError: without calibration runs.
    """
    runs = [run for run in record.runs if run.phase == CALIBRATION]
    if like is not None:
        runs = [run for run in runs if run.policy == like.policy]
        runs = [run for run in runs if run.load == like.load] or runs
    steps = [step for run in runs for step in run.steps]
    steps = [step for step in steps if step.profile_s > 0.0 and step.whole_s > 0.0]
    if not steps:
        raise ValueError("the record has no calibration steps")
    plain = [step for step in steps if not step.drafts]
    drafted = [step for step in steps if step.drafts]
    # Prompts make the large forwards: fitted to those of decoding alone, the line is wrong for them.
    sampled = [(seconds, told) for step in steps for told, seconds in step.prompts]
    sampled += [(s.forward_s, s.profile_s) for s in (plain if len(plain) >= LEAST_SAMPLES else steps)]
    line = _line_of(sampled, _bend_s(record.profile.target))
    after_drafting = 1.0
    if drafted:
        after_drafting = _factor([(s.forward_s - _prompts_s(s, line), _decoding_s(s, line)) for s in drafted])
    plain_factor = line.factor
    factors = {"target": plain_factor, "target after drafting": after_drafting * plain_factor}
    costs = record.profile.drafters
    lines = _draft_lines(costs, [draft for step in drafted for draft in step.drafts])
    factors |= {name: held.factor for name, held in lines.items()}
    trips = _trips(plain, drafted)
    pace, jitter = fit_pace([_deviations(run.steps, line, after_drafting) for run in runs])
    profile = HardwareProfile(
        name="this-machine",
        target="as configured",
        hardware=str(record.environment.get("processor", "")),
        source="measured on a running cell",
        error="",
        cost=_bent(record.profile.target, line),
        num_slots=record.num_slots,
        max_tokens=record.max_tokens,
        drafters={
            name: DrafterProfile(
                model=name,
                cost=cost.scaled(lines[name].factor) if name in lines else cost,
                quality=DraftQuality(rate={"*": 0.5}),
                call_s=lines[name].fixed_s if name in lines else 0.0,
                num_parameters=record.num_parameters.get(name, 0),
            )
            for name, cost in costs.items()
        },
        collocated=False,
        overhead_s=record.profile.overhead_s,
        trips=trips,
        after_drafting=after_drafting,
        pace=pace,
    )
    return ServedProfile(
        profile=profile,
        jitter=jitter,
        factors={name: round(value, 4) for name, value in factors.items()},
        fixed_s=line.fixed_s,
        bend=round(line.beyond / line.factor, 4) if line.factor else 1.0,
        num_steps=len(steps),
        error=_error(steps, profile, record.profile, lines, line),
    )


def draft_seconds(cost: LinearCost, draft: DraftSample) -> float:
    """A call by the profile: one forward reads what was committed and gives the first layer."""
    mean = draft.num_context / max(1, draft.num_requests)
    read = 2 * draft.num_requests
    seconds = cost.seconds(draft.num_requests, read, draft.num_context, read * mean)
    for rows in draft.rows[:-1]:
        seconds += cost.seconds(
            min(draft.num_requests, rows), rows, int(min(draft.num_requests, rows) * mean)
        )
    return seconds


def _draft_lines(costs: Mapping[str, LinearCost], calls: Sequence[DraftSample]) -> dict[str, _Line]:
    """Of each drafter, what a call took by what the profile says of its forwards; none without calls.

    Who was hardly asked is as much slower than its profile as the others: it would be taken for the fastest
    else, and asked.
    """
    lines = {}
    for name in costs:
        own: Sequence[DraftSample] = [draft for draft in calls if draft.drafter == name]
        own = own if len(own) >= LEAST_SAMPLES else calls
        if len(own) >= LEAST_SAMPLES:
            lines[name] = _line_of([(d.seconds, draft_seconds(costs[d.drafter], d)) for d in own], math.inf)
    return lines


def _draft_s(cost: LinearCost, draft: DraftSample, line: _Line | None) -> float:
    """A call by its line, or by the profile."""
    seconds = draft_seconds(cost, draft)
    return seconds if line is None else line.seconds(seconds)


def _factor(pairs: Sequence[tuple[float, float]]) -> float:
    """Sum of what was over sum of what was predicted, without what something else made longer."""
    held = np.array([(was, said) for was, said in pairs if said > 0.0])
    ratio = held[:, 0] / held[:, 1]
    kept = held[ratio <= OUTLIER * np.median(ratio)]
    return float(kept[:, 0].sum() / kept[:, 1].sum())


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a forward by those of the profile: a fixed part, a factor up to the bend, one beyond it."""

    fixed_s: float
    factor: float
    beyond: float
    bend_s: float

    def seconds(self, told: float) -> float:
        """Of a forward that the profile has for `told` seconds."""
        return (
            self.fixed_s + self.factor * min(told, self.bend_s) + self.beyond * max(0.0, told - self.bend_s)
        )


def _decoding_s(step: StepSample, line: _Line) -> float:
    """By the line, what decodes in an iteration's forward; all of it where the record does not tell."""
    return line.seconds(step.profile_s if step.decoding_s is None else step.decoding_s)


def _prompts_s(step: StepSample, line: _Line) -> float:
    """By the line, what prompts read beside the trees add: drafts do not slow it."""
    return line.seconds(step.profile_s) - _decoding_s(step, line)


def _forward_s(step: StepSample, line: _Line, after_drafting: float) -> float:
    """By the line, an iteration's forward."""
    decoding_s = _decoding_s(step, line) * (after_drafting if step.drafts else 1.0)
    return decoding_s + _prompts_s(step, line)


def _deviations(steps: Sequence[StepSample], line: _Line, after_drafting: float) -> tuple[Float64, Float64]:
    """When the forwards of a run began, as if iterations had followed at once, and how far off each was."""
    held = [step for step in steps if step.profile_s > 0.0 and step.whole_s > 0.0]
    times = np.cumsum([step.whole_s for step in held])
    return times, np.log([s.forward_s / _forward_s(s, line, after_drafting) for s in held])


def _line_of(pairs: Sequence[tuple[float, float]], bend_s: float) -> _Line:
    """Fits pairs of what a forward took and what the profile has for it; the sum is then right.

    By relative errors, so that small forwards count as much as large ones.
    """
    held = np.array([(was, said) for was, said in pairs if said > 0.0])
    ratio = held[:, 0] / held[:, 1]
    was, said = held[ratio <= OUTLIER * np.median(ratio)].T
    columns = np.stack([np.ones(len(said)), np.minimum(said, bend_s), np.maximum(said - bend_s, 0.0)], axis=1)
    tie = _SAME_SLOPE * np.sqrt(len(said))
    nothing = _NOTHING_FIXED * np.sqrt(len(said)) / said.mean()
    rows = np.concatenate([columns / said[:, None], [[0.0, tie, -tie], [nothing, 0.0, 0.0]]])
    found, _ = nnls(rows, np.append(was / said, [0.0, 0.0]))
    fixed_s, factor, beyond = (found * was.sum() / (columns @ found).sum()).tolist()
    return _Line(fixed_s=fixed_s, factor=factor, beyond=beyond, bend_s=bend_s)


def _bend_s(cost: LinearCost) -> float:
    """Where the line bends; nowhere for a profile with a knee: a cost has one. Nor with experts, whose rows
    and seconds are not in proportion."""
    is_straight = cost.gamma and not cost.gamma_knee and not cost.experts_s
    return BEND * cost.seconds(1, 1, 0) if is_straight else math.inf


def _bent(cost: LinearCost, line: _Line) -> LinearCost:
    """The cost of such a line, its bend where it is for one short request."""
    found = cost.scaled(line.factor)
    if math.isinf(line.bend_s):
        return msgspec.structs.replace(found, delta=found.delta + line.fixed_s)
    rows = (line.bend_s - cost.seconds(1, 0, 0)) / cost.gamma
    less = (line.beyond - line.factor) * cost.gamma
    return msgspec.structs.replace(found, delta=found.delta + line.fixed_s, gamma_knee=less, knee_tokens=rows)


def _trips(plain: Sequence[StepSample], drafted: Sequence[StepSample]) -> Trips:
    """What is left of an iteration besides forwards, linear in its requests, without and with drafts.

    Of plain ones sent ahead it is what is between two forwards. Hardly any of a kind tell only what part it
    is of what another kind takes: plain ones of drafted ones, those sent ahead of those in turn. Where nobody
    drafted, the few plain ones in turn take what those ahead take.
    """
    ahead = [step for step in plain if step.ahead]
    plain = [step for step in plain if not step.ahead]
    gap = _line(ahead) if len(ahead) >= LEAST_SAMPLES else None
    verify = _line(plain) if len(plain) >= LEAST_SAMPLES else None
    both = _line(drafted) if len(drafted) >= LEAST_SAMPLES else None
    if verify is None:
        verify = (gap or (0.0, 0.0)) if both is None else _part_of(both, plain, _PLAIN_SHARE)
    if gap is None:
        gap = _part_of(verify, ahead, 1.0)
    both = both or verify
    return Trips(
        verify_s=verify[0],
        verify_request_s=verify[1],
        draft_s=max(0.0, both[0] - verify[0]),
        draft_request_s=max(0.0, both[1] - verify[1]),
        ahead_s=gap[0],
        ahead_request_s=gap[1],
    )


def _part_of(line: tuple[float, float], few: Sequence[StepSample], unknown: float) -> tuple[float, float]:
    """A line scaled to what a few steps took, but to no more than itself; by `unknown` without any."""
    told = sum(line[0] + line[1] * step.num_requests for step in few)
    share = min(1.0, max(0.0, sum(rest_s(step) for step in few)) / told) if told else 1.0
    share = share if few else unknown
    return share * line[0], share * line[1]


def _line(steps: Sequence[StepSample]) -> tuple[float, float]:
    """Seconds, and seconds per request, of what is in no forward; both at least 0."""
    beside = np.array([rest_s(step) for step in steps])
    count = np.array([step.num_requests for step in steps], dtype=np.float64)
    kept = beside <= OUTLIER * max(1e-4, float(np.median(beside)))
    columns = np.stack([np.ones(int(kept.sum())), count[kept]], axis=1)
    (fixed, each), _ = nnls(columns, np.maximum(beside[kept], 0.0))
    return float(fixed), float(each)


def rest_s(step: StepSample) -> float:
    """What of an iteration was neither the slowest draft call nor the target's forward."""
    return step.whole_s - step.forward_s - max((draft.seconds for draft in step.drafts), default=0.0)


def _error(
    steps: Sequence[StepSample],
    profile: HardwareProfile,
    told: CostProfile,
    drafters: dict[str, _Line],
    line: _Line,
) -> float:
    was: dict[bool, float] = defaultdict(float)
    fitted: dict[bool, float] = defaultdict(float)
    trips = profile.trips or Trips(verify_s=0.0)
    for step in steps:
        kind = bool(step.drafts)
        seconds = _forward_s(step, line, profile.after_drafting)
        if step.ahead:
            seconds += trips.gap_s(step.num_requests)
        else:
            seconds += trips.verify_s + trips.verify_request_s * step.num_requests
        if kind:
            seconds += trips.draft_s + trips.draft_request_s * step.num_requests
            seconds += max(
                _draft_s(told.drafters[d.drafter], d, drafters.get(d.drafter)) for d in step.drafts
            )
        was[kind] += step.whole_s
        fitted[kind] += seconds
    return sum(fitted.values()) / sum(was.values()) - 1.0
