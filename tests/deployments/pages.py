"""Pages in a browser, and the cell behind the server that serves them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.browser import LAUNCH
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import ANSWER, codec, ids

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

# Tests in a browser share it, and so its event loop: it takes longer to start than all that they do in it.
in_browser = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(**LAUNCH)
        yield started
        await started.close()


@pytest_asyncio.fixture(loop_scope="module")
async def cell_of_page() -> AsyncIterator[CellStandIn]:
    stand_in = CellStandIn(lambda submit: [*ids(ANSWER), *codec().eos_ids])
    yield stand_in
    await stand_in.close()


@asynccontextmanager
async def opened(browser: Browser) -> AsyncIterator[Page]:
    """A page of a profile of its own."""
    context = await browser.new_context()
    try:
        yield await context.new_page()
    finally:
        await context.close()
