"""Front ends keep to cells whose texts they can go on with."""

from __future__ import annotations

import pytest

from cluster.config import FlotillaConfig
from cluster.members import Member
from cluster.served_target import served_target
from deployments.directory import ListedCells


def target(**changes: object) -> str:
    raw = {"path": "/models/a", "dtype": "bfloat16"} | changes
    return served_target(FlotillaConfig.model_validate({"target": raw}).target)


@pytest.mark.parametrize(
    "changes",
    [{"path": "/models/b"}, {"dtype": "float16"}, {"quantization": "fp8"}, {"served_name": "other"}],
)
def test_another_target_has_another_name(changes: dict[str, object]) -> None:
    assert target(**changes) != target()


@pytest.mark.parametrize(
    "changes", [{"tensor_parallel": 2}, {"num_slots": 99}, {"sampling_defaults": "openai"}]
)
def test_how_it_runs_is_no_other_target(changes: dict[str, object]) -> None:
    assert target(**changes) == target()


async def test_cells_of_another_target_are_not_listed() -> None:
    own, other = target(), target(path="/models/b")
    members = [
        Member(kind="cell", id="old", node="n", details={"target": other}),
        Member(kind="cell", id="new", node="n", details={"target": own, "stage": "ready"}),
        Member(kind="cell", id="unknown", node="n"),
        Member(kind="front_end", id="f", node="n", details={"target": own}),
    ]
    assert [cell.id for cell in await ListedCells(lambda: members, own).cells()] == ["new"]
