"""A `StepContext` taken apart for the record of decisions, and put together again for a replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from cluster.calibration import Calibration
from cluster.cost_model import CostModel, CostProfile
from cluster.decisions import CalibrationTable, CallContext, DecisionsError
from cluster.policies.base import StepContext

# What is not recorded as it is: costs are a profile and corrections, calibration is tables with versions.
_APART = ("cost", "calibration")


def context_values(context: StepContext) -> dict[str, Any]:
    """The plain fields of a context."""
    return {
        one.name: getattr(context, one.name) for one in dataclasses.fields(context) if one.name not in _APART
    }


def calibration_state(calibration: Calibration, drafter: str) -> dict[str, Any]:
    """What was learnt about one drafter; the arrays are those in use, not copies."""
    learnt = calibration.of(drafter)
    return {
        one.name: getattr(learnt, one.name)
        for one in dataclasses.fields(learnt)
        if not one.name.startswith("_")
    }


def restored_context(
    recorded: CallContext, profile: CostProfile, tables: Mapping[tuple[str, int], CalibrationTable]
) -> StepContext:
    """The context of a call as it was.

    Args:
        recorded: of that call.
        profile: of the record's header.
        tables: calibration tables by drafter and version.

    Raises:
        DecisionsError: if a table, or a field that contexts have today, is missing.
    """
    calibration = Calibration(recorded.kinds)
    for drafter, version in recorded.calibration.items():
        table = tables.get((drafter, version))
        if table is None:
            raise DecisionsError(f"version {version} of the calibration of drafter `{drafter}` is missing")
        learnt = calibration.of(drafter)
        try:
            for name, value in table.state.items():
                setattr(learnt, name, np.array(value, dtype=np.float64))
        except (AttributeError, TypeError, ValueError) as error:
            raise DecisionsError(
                f"version {version} of the calibration of drafter `{drafter}` is none of this version of "
                f"Flotilla: {error}"
            ) from error
    missing = {one.name for one in dataclasses.fields(StepContext)} - {*_APART, *recorded.values}
    if missing:
        raise DecisionsError(
            f"the record was made by another version of Flotilla: it lacks {', '.join(sorted(missing))}"
        )
    try:
        return StepContext(
            cost=CostModel.corrected(profile, recorded.corrections, recorded.kinds, recorded.plain_by_size),
            calibration=calibration,
            **recorded.values,
        )
    except TypeError as error:
        raise DecisionsError(f"the record was made by another version of Flotilla: {error}") from error
