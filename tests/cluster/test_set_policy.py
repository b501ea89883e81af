"""Changing the selector of a cell that serves: another one decides, and each keeps what it has learnt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from cluster.cell import Cell
from cluster.config import FlotillaConfig, TargetConfig
from cluster.drafter_config import PromptLookupConfig
from cluster.events import DrafterReady, VerifierReady
from drafters.prompt_lookup import PromptLookupDrafter
from selector.fixed import Fixed
from selector.lbss import Lbss
from selector.protocol import RequestView

NAMES = ("first", "second")


@pytest_asyncio.fixture
async def cell() -> AsyncIterator[Cell]:
    """A cell whose workers are only said to be there: nothing is asked of them."""
    drafters = tuple(PromptLookupConfig(name=name) for name in NAMES)
    cell = Cell(FlotillaConfig(target=TargetConfig(path="unused"), drafters=drafters))
    cell._starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await cell._starting
    cell._shell.handle(VerifierReady(4096, 1000, 256))
    capabilities = PromptLookupDrafter(vocab_size=256, max_tokens=1000).capabilities
    for name in NAMES:
        cell._shell.handle(DrafterReady(name, capabilities, 8, kind=name))
    yield cell


async def test_the_named_selector_decides_with_its_parameters_on_the_same_drafters(cell: Cell) -> None:
    before = cell.core
    await cell.set_policy({}, selector={"name": "fixed", "drafters": ["second"]})
    assert cell.config.selector.name == "fixed"
    pool = cell.core.pool
    assert isinstance(pool.selector, Fixed)
    request = RequestView("r1", "", NAMES, 10, 10, 20, 0)
    assert pool.selector.assign([request], pool.pool_view()) == {"r1": "second"}
    assert set(cell.core.pool.drafters) == set(NAMES)
    assert cell.core.verifier == before.verifier
    assert cell.config.policy == before.config.policy
    assert cell.config.scheduler == before.config.scheduler


async def test_a_selector_used_before_goes_on_with_what_it_had_learnt(cell: Cell) -> None:
    first = cell.core
    first.pool.acceptance.begin("r1", [1, 2, 3], ())
    unknown = first.pool.acceptance.rate("r2", "first")
    first.pool.acceptance.observe("r1", "first", 50, 0)
    learnt = first.pool.acceptance.rate("r2", "first")
    assert learnt < unknown
    await cell.set_policy({}, selector={"name": "lbss"})
    second = cell.core
    assert isinstance(second.pool.selector, Lbss)
    assert second.pool.acceptance.rate("r2", "first") == unknown
    await cell.set_policy({}, selector={"name": first.config.selector.name})
    assert cell.core.pool.acceptance.rate("r2", "first") == learnt
    await cell.set_policy({}, selector={"name": "lbss"})
    assert cell.core is second


@pytest.mark.parametrize(
    ("selector", "why"),
    [
        ({"name": "nonesuch"}, "unknown selector `nonesuch`"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"epsilon": 2.0}, "less than or equal to 1"),
        ({"alpha": 2, "beta": 4}, "beta 4 is above alpha 2"),
    ],
)
async def test_what_is_no_selector_is_refused_and_nothing_changes(
    cell: Cell, selector: dict[str, object], why: str
) -> None:
    before, config = cell.core, cell.config
    with pytest.raises(ValueError, match=why):
        await cell.set_policy({}, selector=selector)
    assert cell.core is before
    assert cell.config == config
    assert set(cell.core.pool.drafters) == set(NAMES)


async def test_a_least_depth_above_the_most_is_refused(cell: Cell) -> None:
    before = cell.core
    with pytest.raises(ValueError, match="min_depth 5 is above max_depth 3"):
        await cell.set_policy({"min_depth": 5, "max_depth": 3})
    assert cell.core is before
    await cell.set_policy({"max_depth": 0})  # none are drafted, whatever the least is
