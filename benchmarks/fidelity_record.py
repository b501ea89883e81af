"""What `flotilla bench fidelity` measures on a running cell: requests, steps, costs. Knows no Ray."""

from __future__ import annotations

import math
import sys
from typing import Any

import msgspec

from cluster.cost_model import CostProfile
from cluster.stream_messages import Objective, Receipt

CALIBRATION, TEST = "calibration", "test"


class ServedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it was sent and answered.

    Attributes:
        domain: its class.
        arrival_s: when it was sent, from the start of the run.
        max_tokens: bound on its answer.
        objective: what it was served on.
        receipt: the cell's account; None if it failed.
        client_ms: end to end as the client saw it.
    """

    domain: str
    arrival_s: float
    max_tokens: int
    objective: Objective
    receipt: Receipt | None
    client_ms: float | None


class DraftSample(msgspec.Struct, frozen=True, kw_only=True):
    """One draft call.

    Attributes:
        drafter: its kind.
        num_requests: drafted for.
        rows: by layer of the deepest tree, nodes of all trees: each layer was a forward.
        num_context: tokens of those requests.
        seconds: it took, in the drafter.
    """

    drafter: str
    num_requests: int
    rows: list[int]
    num_context: int
    seconds: float


class StepSample(msgspec.Struct, frozen=True, kw_only=True):
    """One decode iteration.

    Attributes:
        num_requests: verified.
        num_tokens: rows of the trees.
        num_committed: tokens they got.
        profile_s: the forward by the cost profile, prompts read beside the trees included.
        forward_s: as it was.
        whole_s: from planning to the verdicts.
        drafts: its draft calls.
        told: what the policy planned by, plain fields of `StepContext` and the corrections of its cost model.
        rates: estimated acceptance rates of the requests that something was planned for.
        depths: planned for them.
        prompts: forwards of prompts alone since the step before, by the cost profile and as they were.
        decoding_s: of `profile_s`, what decodes alone; None in records that did not tell it yet.
        ahead: sent while the iteration before was computed; then `whole_s` is from that one's verdicts.
    """

    num_requests: int
    num_tokens: int
    num_committed: int
    profile_s: float
    forward_s: float
    whole_s: float
    drafts: list[DraftSample] = []
    told: dict[str, float] = {}
    rates: list[float] = []
    depths: list[int] = []
    prompts: list[tuple[float, float]] = []
    decoding_s: float | None = None
    ahead: bool = False


class ServedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One policy under one load.

    Attributes:
        policy: as asked for, like `flotilla` or `fixed:fixed_depth=3`.
        config: of the cell with it (`FlotillaConfig`).
        phase: `calibration` or `test`; they have different prompts.
        load: share of the saturation throughput.
        seed: of the requests.
        duration_s: until the last answer.
        requests: by arrival.
        steps: its iterations.
    """

    policy: str
    config: dict[str, Any]
    phase: str
    load: float
    seed: int
    duration_s: float
    requests: list[ServedRequest]
    steps: list[StepSample]


class FidelityRecord(msgspec.Struct, kw_only=True):
    """Everything a simulation needs, and what it is compared with.

    Attributes:
        environment: where it was measured.
        profile: costs that the cell was told, measured just before.
        num_slots, max_tokens: of the target.
        saturation: requests per second without speculation.
        acceptance_file: the log of what drafters say along answers to calibration prompts.
        num_parameters: of drafters' models, by drafter, by which selectors order them.
        runs: in the order they were taken.
    """

    environment: dict[str, Any]
    profile: CostProfile
    num_slots: int
    max_tokens: int
    saturation: float
    acceptance_file: str
    num_parameters: dict[str, int] = {}
    runs: list[ServedRun] = []


def to_json(record: FidelityRecord) -> bytes:
    """The record as JSON, which has no infinity: the gap of a request that had never two tokens to choose."""
    return msgspec.json.encode(msgspec.structs.replace(record, runs=[_finite(run) for run in record.runs]))


def _finite(run: ServedRun) -> ServedRun:
    requests = [
        one
        if one.receipt is None or math.isfinite(one.receipt.min_gap)
        else msgspec.structs.replace(
            one, receipt=msgspec.structs.replace(one.receipt, min_gap=sys.float_info.max)
        )
        for one in run.requests
    ]
    return msgspec.structs.replace(run, requests=requests)
