"""The console's page in a browser, on a server that asks for keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cluster.security_config import SecurityConfig
from cluster.tier_config import TierConfig
from deployments.api_keys import hash_key, new_key
from deployments.api_service import ApiService
from deployments.authentication import Authenticator
from deployments.openai_api import create_app
from tests.browser import needs_chromium
from tests.deployments.pages import browser, cell_of_page, in_browser, opened
from tests.deployments.socket_server import served
from tests.deployments.test_console import KEY, guarded
from tests.fakes.cell_stand_in import CellStandIn, eventually
from tests.fakes.tiny_tokenizer import ANSWER, codec

if TYPE_CHECKING:
    from playwright.async_api import Browser

__all__ = ["browser", "cell_of_page"]  # fixtures


@needs_chromium
@in_browser
async def test_the_page_asks_for_the_key_and_keeps_it_nowhere(
    browser: Browser, cell_of_page: CellStandIn
) -> None:
    from playwright.async_api import expect

    cell = cell_of_page
    async with served(guarded(ApiService(cell, codec()))) as url, opened(browser) as page:
        await page.goto(f"{url}/console")
        dialog = page.locator("#key-dialog")
        await expect(dialog).to_be_visible()
        wrong = page.locator("#key-wrong")
        await expect(wrong).to_be_hidden()
        await page.get_by_label("Key", exact=True).fill("a wrong key")
        await page.get_by_role("button", name="Use").click()
        await expect(dialog).to_be_visible()
        await expect(wrong).to_have_text("This server does not know the key that was given.")
        await page.get_by_label("Key", exact=True).fill(KEY)
        await page.get_by_role("button", name="Use").click()
        await expect(page.locator("[data-cell=one]")).to_be_visible()
        await expect(dialog).to_be_hidden()

        cell.pause_s = 0.05
        await page.locator("#send").click()
        await expect(page.locator("#stop")).to_be_enabled()
        await expect(page.locator("#answer-status")).to_contain_text("done: ")
        assert await page.locator("#answer").text_content() == ANSWER

        # Stopping ends the request in the cell, too.
        cell.pause_s = 0.2
        await page.locator("#send").click()
        await expect(page.locator("#answer .token").first).to_be_visible()
        await page.locator("#stop").click()
        await expect(page.locator("#answer-status")).to_have_text("stopped")
        await expect(page.locator("#send")).to_be_enabled()
        await eventually(lambda: len(cell.cancels) == 1)

        stored = await page.evaluate("() => [localStorage.length, sessionStorage.length, document.cookie]")
        assert stored == [0, 0, ""]
        assert KEY not in json.dumps(await page.context.storage_state())
        assert await page.locator("#key").input_value() == ""


@needs_chromium
@in_browser
async def test_without_a_key_the_page_does_not_go_on_asking(
    browser: Browser, cell_of_page: CellStandIn
) -> None:
    """Each refusal is an error in metrics and log, and a page may be left open for days."""
    from playwright.async_api import expect

    async with served(guarded(ApiService(cell_of_page, codec()))) as url, opened(browser) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        await page.goto(f"{url}/console")
        key, use = page.get_by_label("Key", exact=True), page.get_by_role("button", name="Use")
        # What no header can carry is no server that cannot be reached.
        await key.fill("ключ")
        await use.click()
        assert await key.evaluate("field => field.matches(':invalid')")
        await page.get_by_role("button", name="Cancel").click()
        asked.clear()
        await page.wait_for_timeout(2500)
        assert asked == []
        await expect(page.locator("#connection")).to_have_text(" needs a key")
        await page.locator("#key-button").click()
        await key.fill(f" {KEY} ")
        await use.click()
        await expect(page.locator("#connection")).to_have_text(" live")
        # Another key might be given; the one there is stays in use meanwhile.
        await page.locator("#key-button").click()
        await page.get_by_role("button", name="Cancel").click()
        asked.clear()
        await page.wait_for_timeout(2500)
        assert len(asked) >= 2


@needs_chromium
@in_browser
async def test_what_a_key_may_not_ask_for_is_not_offered(
    browser: Browser, cell_of_page: CellStandIn, tmp_path: Path
) -> None:
    """Each tier was, and the target: with most choices every request was refused."""
    from playwright.async_api import expect

    cell_of_page.adapters = {"terse": "/adapters/terse", "verbose": "/adapters/verbose"}
    may = {
        "fast": {"tiers": ["slow", "fast"]},
        "terse": {"models": ["terse"]},
        "target": {"models": ["demo"]},
        "all": {},
        "scraper": {"permissions": ["metrics"]},
    }
    keys = {name: new_key() for name in may}
    file = tmp_path / "keys.json"
    entries = [{"name": name, "hash": hash_key(keys[name]), **of} for name, of in may.items()]
    file.write_bytes(msgspec.json.encode({"keys": entries}))
    tiers = {"fast": TierConfig(tpot_ms=10), "slow": TierConfig()}
    service = ApiService(cell_of_page, codec(), tiers=tiers)
    app = create_app(service, authenticator=Authenticator(SecurityConfig(keys_file=file), environment={}))
    async with served(app) as url, opened(browser) as page:
        await page.goto(f"{url}/console")
        key, use = page.get_by_label("Key", exact=True), page.get_by_role("button", name="Use")
        tier, model = page.locator("#tier option"), page.locator("#model option")
        await key.fill(keys["scraper"])
        await use.click()
        await expect(page.locator("#key-wrong")).to_have_text("This API key does not allow `api` endpoints.")
        choices = (
            ("terse", ["default", "fast", "slow"], ["terse"]),
            ("target", ["default", "fast", "slow"], []),
            ("all", ["default", "fast", "slow"], ["demo", "terse", "verbose"]),
            ("fast", ["fast", "slow"], ["demo", "terse", "verbose"]),
        )
        for number, (name, seen_tiers, seen_models) in enumerate(choices, start=1):
            if not await key.is_visible():
                await page.locator("#key-button").click()
            await key.fill(keys[name])
            await use.click()
            await expect(tier).to_have_text(seen_tiers)
            await expect(model).to_have_text(seen_models)
            await expect(page.locator("#model")).to_be_visible(visible=bool(seen_models))
            await page.locator("#send").click()
            await eventually(lambda number=number: len(cell_of_page.submissions) == number)
            await expect(page.locator("#answer-status")).to_contain_text("done: ")
        assert [one.tier for one in cell_of_page.submissions] == ["default", "default", "default", "fast"]
        assert [one.adapter for one in cell_of_page.submissions] == ["terse", "", "", ""]
