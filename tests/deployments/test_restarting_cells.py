"""Cells that keep dying beside healthy ones are told of; those that come and go as they should are not."""

from __future__ import annotations

import pytest

from deployments.dashboards.alerts import ALERTS
from tests.deployments.promtool_cases import (
    Case,
    Series,
    expect,
    failures_of,
    firing,
    gauge,
    lives,
    made_again,
    needs_promtool,
)

pytestmark = needs_promtool

END = 180
HEALTHY = {
    'flotilla_ready{job="f", cell="healthy"}': gauge([(END, 1)]),
    'flotilla_http_requests_open{job="f", front_end="x"}': gauge([(END, 3)]),
}
RESTARTING = "FlotillaCellsRestarting"


def tells(series: Series, minute: int = 170) -> Case:
    """It fires in the end, and nothing fires as it begins."""
    expected = (
        expect(firing(), 9, 0),
        expect(firing(RESTARTING), 60, 0),
        expect(firing(RESTARTING), minute, 1),
    )
    return Case({**HEALTHY, **series}, expected)


def is_silent(series: Series) -> Case:
    return Case(
        {**HEALTHY, **series}, tuple(expect(firing(RESTARTING), minute, 0) for minute in range(10, END, 5))
    )


def replaced(number: int, begin: int, apart: int, loads: int) -> Series:
    """A rolling change: each cell ends once the one in its place serves."""
    found: Series = {}
    for index in range(number):
        at = begin + index * apart
        found |= lives(f"old-{index}", [(at + loads, 1)])
        found |= lives(f"new-{index}", [(at, None), (loads, 0), (END - at - loads, 1)])
    return found


def taken_back(number: int, begin: int, lasting: int, is_ready: bool) -> Series:
    """A change whose cells were there for a while, and after which there are as many as before."""
    found: Series = {}
    for index in range(number):
        found |= lives(f"changed-{index}", [(begin, None), (1, 0), (lasting - 1, float(is_ready))])
        found |= lives(f"again-{index}", [(begin + lasting, None), (5, 0), (END - begin - lasting - 5, 1)])
    return found


def peaks(number: int, every: int, lasting: int) -> Series:
    """Cells that are added for a load that comes again and again."""
    found: Series = {}
    for at in range(10, END, every):
        for index in range(number):
            found |= lives(f"peak-{at}-{index}", [(at, None), (1, 0), (lasting - 1, 1)])
    return found


def counts(number: int, minute: int) -> dict[str, object]:
    """What it compares with its threshold, before it does."""
    (alert,) = [one for one in ALERTS if one.name == RESTARTING]
    (condition,) = alert.conditions
    value = condition.value.replace("flotilla_ready", 'flotilla_ready{job="f"}')
    return {
        "expr": value,
        "eval_time": f"{minute}m",
        "exp_samples": [{"labels": '{job="f"}', "value": number}],
    }


#: By name; all are evaluated at once.
CASES: dict[str, Case] = {
    "cells that never become ready": tells(made_again(10, END, loads=4, serves=0)),
    "cells that end after having loaded for long": tells(made_again(10, END, loads=19, serves=0)),
    "cells that serve half of the time": tells(made_again(10, END, loads=2, serves=2)),
    "cells that load for long, serve and end": tells(made_again(10, END, loads=7, serves=8)),
    "three cells that are there and never ready": tells(
        {
            name: values
            for index in range(3)
            for name, values in lives(f"b-{index}", [(10, None), (165, 0)]).items()
        }
    ),
    "a rolling change of six cells at once": is_silent(replaced(6, begin=60, apart=0, loads=8)),
    "a rolling change of six cells, one by one": is_silent(replaced(6, begin=30, apart=9, loads=8)),
    "a change of six cells that was taken back": is_silent(
        taken_back(6, begin=60, lasting=10, is_ready=True)
    ),
    "a change that never served, and was taken back": is_silent(
        taken_back(6, begin=60, lasting=10, is_ready=False)
    ),
    "a cell that is added and removed now and then": is_silent(peaks(1, every=30, lasting=15)),
    "four cells for a short peak once an hour": is_silent(peaks(4, every=60, lasting=12)),
    "nothing but a cell that serves, of which zero is counted": Case(HEALTHY, (counts(0, 100),)),
    "cells in one place, of which those that are gone are counted": Case(
        {**HEALTHY, **made_again(70, END, loads=2, serves=8)}, (counts(3, 109), counts(0, 69))
    ),
    "four cells for a long peak": is_silent(peaks(4, every=120, lasting=75)),
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return failures_of(tmp_path_factory.mktemp("rules"), CASES)


@pytest.mark.parametrize("name", CASES)
def test_cells_that_keep_ending_are_told_of_and_others_are_not(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]
