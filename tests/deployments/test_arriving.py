"""Who comes takes over from others once it can: a cell that serves, a front end with a cell to ask."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from cluster.members import Member, State
from deployments import arriving
from deployments.arriving import OthersServing, cells_serve

OWN = Member(kind="front_end", id="own", node="n", state="starting")
OTHER = Member(kind="front_end", id="other", node="n")


def cell(target: str, state: State = "ready") -> Member:
    return Member(kind="cell", id=f"cell of {target}", node="n", state=state, details={"target": target})


@dataclass
class Heard:
    members: list[Member] = field(default_factory=list)
    heard_at: float = 0.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "_POLL_S", 0.01)
    monkeypatch.setattr(arriving, "UNHEARD_S", 0.2)


async def test_it_waits_for_a_cell_of_its_own_while_others_serve_another_target() -> None:
    """Ray Serve replaced front ends while new cells still loaded, or waited: nobody was served till then."""
    heard = Heard()
    coming = asyncio.create_task(cells_serve(heard, "own", "new"))
    for members in ([], [OWN, OTHER, cell("old")], [OWN, OTHER, cell("old"), cell("new", "starting")]):
        heard.members = members
        await asyncio.sleep(0.4)
        assert not coming.done()
    heard.members = [OWN, OTHER, cell("old"), cell("new")]
    await asyncio.wait_for(coming, 5)


async def test_beside_a_cell_of_its_own_it_serves_at_once() -> None:
    began = time.monotonic()
    await cells_serve(Heard([OWN, OTHER, cell("old"), cell("new")]), "own", "new")
    assert time.monotonic() - began < 0.2


@pytest.mark.parametrize(
    "members",
    [
        [OWN],
        [OWN, cell("new", "starting")],
        [OWN, cell("old")],  # nobody answers for it
        [OWN, OTHER, cell("old", "draining")],
        [OWN, OTHER, cell("new", "starting")],
    ],
)
async def test_where_nobody_serves_another_target_it_does_not_wait_for_long(members: list[Member]) -> None:
    await asyncio.wait_for(cells_serve(Heard(members), "own", "new"), 5)


async def test_a_cell_that_comes_waits_though_one_that_serves_is_not_named_for_a_while() -> None:
    """It had much to do and was silent: Ray Serve stopped it for one that could not load its model."""
    heard = Heard()
    others_serve = OthersServing(heard, "own", gone_after_s=0.4)
    own, other = replace(cell("t", "starting"), id="own"), cell("t")
    for members in ([], [own], [own, other]):
        heard.members = members
        assert others_serve
        assert others_serve.are_unheard is (other not in members)
    heard.members = [own]
    await asyncio.sleep(0.2)
    assert others_serve
    await asyncio.sleep(0.4)
    assert not others_serve
    heard.members = [own, other]
    assert others_serve


async def test_a_cell_without_others_counts_as_there_once_a_new_directory_would_have_heard_of_them() -> None:
    others_serve = OthersServing(
        Heard([replace(cell("t", "starting"), id="own"), OTHER]), "own", gone_after_s=60.0
    )
    assert others_serve
    await asyncio.sleep(0.3)
    assert not others_serve
    assert not others_serve.are_unheard
