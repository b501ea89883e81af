"""The record of a step's decisions, as JSON lines: enough to explain them, and to make them again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import msgspec
import numpy as np

from cluster.cost_model import CostProfile
from cluster.policies.base import DecodeRequest
from drafters.messages import DraftPlan
from engine.stop_rules import StopRule
from engine.tree import TokenTree

FORMAT_VERSION = 1


class Header(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="header"):
    """First line of a record, and again wherever another scheduler goes on in the same file.

    Attributes:
        version: of this format.
        scheduler: whose decisions these are; the same where one goes on after others wrote.
        flotilla: version that wrote it.
        recorded_at: when, ISO 8601 in UTC.
        policy: the fields of `PolicyConfig`.
        profile: costs the predictions start from.
        first_call: how many calls of the policy came before the first one recorded; above 0 the record
            starts mid-way, and a policy that remembers earlier steps may decide differently in a replay.
    """

    version: int
    scheduler: str
    flotilla: str
    recorded_at: str
    policy: dict[str, Any]
    profile: CostProfile
    first_call: int = 0


class CalibrationTable(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="calibration"):
    """What was learnt about one drafter's probabilities; written before the first step that refers to it.

    Attributes:
        drafter: name of its kind.
        version: number that steps refer to it by.
        state: the fields of `DrafterCalibration`, arrays as lists.
    """

    drafter: str
    version: int
    state: dict[str, Any]


class CallContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The `StepContext` of one call of the policy.

    Attributes:
        values: its plain fields by name (`step_s`, `step`, ...).
        corrections: factors on the predictions of the cost profile, by model; 1 where not named.
        calibration: versions of the calibration tables, by drafter kind.
        kinds: of the batch's drafter instances, where that is not their own name.
        plain_by_size: those of plain verify forwards of 1, 2, 4, ... rows. Records from before there were
            such lack them: `verifier` holds for all.
    """

    values: dict[str, Any]
    corrections: dict[str, float]
    calibration: dict[str, int]
    kinds: dict[str, str] = {}
    plain_by_size: list[float] = []


class PolicyCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of `Policy.plan` or `Policy.select`.

    Attributes:
        order: number of the call, from 0; policies that remember are replayed in this order.
        requests: the batch, as indices of the step's `requests`.
        context: what else it was given.
        budget: tokens of the verify step it had to keep to, where it worked with such a budget.
    """

    order: int
    requests: list[int]
    context: CallContext
    budget: int | None = None


class StopRuleCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of `StopsDrafting.stop_rule`, and what came of it.

    Attributes:
        order, requests, context: as of `PolicyCall`.
        drafter, num_drafting: its arguments.
        rule: the rule it made, if it made one.
    """

    order: int
    requests: list[int]
    context: CallContext
    drafter: str
    num_drafting: int
    rule: StopRule | None


class Seconds(msgspec.Struct, kw_only=True):
    """Predicted against actual time; no actual one where it was not seen."""

    predicted: float
    actual: float | None = None


class ForwardSeconds(Seconds, kw_only=True):
    """Those of a forward of the target.

    Attributes:
        profile: what the cost profile without corrections says; None in records that did not tell it yet.
        profile_decoding: of that, what decodes alone, without prompts read beside it; None likewise.
    """

    profile: float | None = None
    profile_decoding: float | None = None


class DraftCallRecord(msgspec.Struct, kw_only=True):
    """One drafter instance's part of the step; `actual` seconds are unknown if it did not answer in time."""

    drafter: str
    num_requests: int
    seconds: Seconds


class RequestDecision(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request in one step.

    Attributes:
        request: as the policy saw it, its drafter (the instance) included; without one if the policy rested.
        required: A(r), tokens it needed from the step to meet its objective; 0 without one.
        required_capped: what an SLO phase aimed at, if one ran.
        plan: shape asked for; None if it was planned for in an earlier step and is verified only now, or the
            policy rested.
        tree: its candidate tree, as the policy saw it; None where nothing was drafted for the batch.
        acceptance: chance that each node of `tree` is accepted, by calibration.
        chosen: nodes of `tree` chosen by each phase of selection, the root excluded; policies without
            phases choose in one, `selected`. `planned` are all nodes of a step that was planned ahead.
        verified: draft tokens verified; fewer than chosen where the request's own wish or a lack of
            slots forbade more; None if no verification was seen.
        accepted: nodes of `tree` that were accepted.
        committed: tokens the request got.
    """

    request: DecodeRequest
    required: float = 0.0
    required_capped: float | None = None
    plan: DraftPlan | None = None
    tree: TokenTree | None = None
    acceptance: list[float] | None = None
    chosen: dict[str, list[int]] = {}
    verified: int | None = None
    accepted: list[int] = []
    committed: int | None = None

    @property
    def nodes(self) -> list[int]:
        """All nodes chosen, ascending, the root included."""
        return [0, *sorted(node for nodes in self.chosen.values() for node in nodes)]


class StepRecord(msgspec.Struct, kw_only=True, tag_field="record", tag="step", omit_defaults=True):
    """One iteration of a micro-batch: planned, drafted, selected, verified.

    Attributes:
        step: number of the verify step it was planned in.
        time_s: when, by the scheduler's clock.
        requests: what was decided for each request.
        plans: the calls of `Policy.plan`; several where requests became ready one after the other, none if
            all these trees were left over from an earlier step, or the policy rested.
        stop_rules: the calls of `StopsDrafting.stop_rule`, one for each draft call of such a policy.
        select: the call of `Policy.select`; None where no drafts came in, so that nothing was to be chosen.
        context: what the policy would have been given, where it was not asked at all.
        drafts: the draft calls.
        verify: seconds of the target's forward.
        whole: seconds from planning to the verdicts.
        prompts: forwards of prompts alone that ended since the step before.
        ahead: sent before the step before it was answered; it then begins with that answer.
    """

    step: int
    time_s: float
    requests: list[RequestDecision]
    plans: list[PolicyCall] = []
    stop_rules: list[StopRuleCall] = []
    select: PolicyCall | None = None
    context: CallContext | None = None
    drafts: list[DraftCallRecord] = []
    verify: ForwardSeconds | None = None
    whole: Seconds | None = None
    prompts: list[ForwardSeconds] = []
    ahead: bool = False

    @property
    def orders(self) -> list[int]:
        """Numbers of the policy's calls in this step."""
        orders = [call.order for call in self.plans] + [call.order for call in self.stop_rules]
        return orders if self.select is None else [*orders, self.select.order]

    @property
    def known(self) -> CallContext | None:
        """What was known when it was planned, or selected for if it was planned in an earlier step."""
        calls = self.plans or ([] if self.select is None else [self.select])
        return calls[-1].context if calls else self.context


Entry = Header | CalibrationTable | StepRecord


class DecisionsError(ValueError):
    """A record cannot be read; the message names the line and says why."""


def encode_entry(entry: Entry) -> bytes:
    """One line, without its end."""
    values = msgspec.to_builtins(entry, enc_hook=_array_to_list)
    if isinstance(entry, StepRecord):
        for decision in values["requests"]:
            if "plan" in decision:
                decision["plan"] = {k: v for k, v in decision["plan"].items() if v != _NO_PLAN.get(k)}
    return msgspec.json.encode(_finite(values))


def decode_entry(line: bytes) -> Entry:
    """The entry in a line. Raises `msgspec.MsgspecError` for anything else."""
    entry: Entry = _decoder.decode(line)
    return entry


def read_entries(lines: Iterable[bytes]) -> Iterator[Entry]:
    """The entries of a record, checked for what can be checked line by line.

    Raises:
        DecisionsError: naming the line: it is cut off, is no entry, has another version, or no header
            comes first.
    """
    has_header = False
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = decode_entry(line)
        except msgspec.MsgspecError as error:
            if not line.endswith(b"\n"):
                raise DecisionsError(
                    f"line {number} is cut off: its writer was interrupted. Every line before it is good"
                ) from error
            raise DecisionsError(f"line {number} is no entry of a record of decisions: {error}") from error
        if isinstance(entry, Header):
            has_header = True
            if entry.version != FORMAT_VERSION:
                raise DecisionsError(
                    f"line {number}: format version {entry.version}, written by Flotilla {entry.flotilla}; "
                    f"this one reads version {FORMAT_VERSION}"
                )
        elif not has_header:
            raise DecisionsError(
                f"line {number}: a record of decisions begins with a header, and this has none"
            )
        yield entry
    if not has_header:
        raise DecisionsError("there is no record of decisions in it: it is empty")


def _array_to_list(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype == np.float32:
            # The shortest decimals that are read back as the same float32.
            return [float(text) for text in value.astype(str).tolist()]
        if (np.abs(value) < _EXACT).all() and (value == np.rint(value)).all():
            return value.astype(np.int64).tolist()  # counts, kept as floats
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    # What msgspec asks of a hook for types it does not know.
    raise NotImplementedError(f"cannot record a {type(value).__name__}")


def _list_to_array(target: Any, value: Any) -> Any:
    if getattr(target, "__origin__", None) is not np.ndarray:
        # What msgspec asks of a hook for types it does not know.
        raise NotImplementedError(f"cannot read a {target}")
    if not isinstance(value, list):
        raise TypeError(f"Expected `array`, got `{type(value).__name__}`")
    dtype = get_args(get_args(target)[1])[0]
    return np.array([dtype(one) for one in value], dtype=dtype)


def _finite(value: Any) -> Any:
    """The same with infinities as text: JSON has none, and reading turns the text into a number again."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return value


# Integers below this are exact as float64.
_EXACT = 2.0**53
# What a plan's field is when it is left out.
_NO_PLAN = {one.name: one.default for one in msgspec.structs.fields(DraftPlan)}
_decoder = msgspec.json.Decoder(Entry, dec_hook=_list_to_array, strict=False)
