"""The console's page in a browser."""

from __future__ import annotations

import contextlib
import re
from functools import partial
from typing import TYPE_CHECKING

import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster.members import Member
from cluster.stream_messages import Submit
from cluster.tier_config import TierConfig
from deployments.api_service import ApiService
from deployments.console import ConsoleState
from deployments.openai_api import create_app
from tests.browser import needs_chromium
from tests.deployments.pages import browser, cell_of_page, in_browser, opened
from tests.deployments.socket_server import served
from tests.deployments.test_console import EXPOSITION, Asked, guarded
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import ANSWER, codec, ids

if TYPE_CHECKING:
    from playwright.async_api import Browser

__all__ = ["browser", "cell_of_page"]  # fixtures


def _said(tokens: list[int], submit: Submit) -> list[int]:
    return tokens


@needs_chromium
@in_browser
async def test_the_page_works_under_a_prefix_that_a_proxy_takes_off(
    browser: Browser, cell_of_page: CellStandIn
) -> None:
    from playwright.async_api import expect

    app = create_app(ApiService(cell_of_page, codec()))

    async def proxied(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            assert scope["path"].startswith("/behind/a/"), scope["path"]
            scope = {**scope, "path": scope["path"].removeprefix("/behind/a")}
        await app(scope, receive, send)

    async with served(proxied) as url, opened(browser) as page:
        await page.goto(f"{url}/behind/a/console/")
        assert page.url == f"{url}/behind/a/console"
        await expect(page.locator("#connection")).to_contain_text("live")
        await page.locator("#send").click()
        await expect(page.locator("#answer-status")).to_contain_text("done: ")
        assert await page.locator("#answer").text_content() == ANSWER


@needs_chromium
@in_browser
async def test_the_page_shows_each_text_once(browser: Browser, cell_of_page: CellStandIn) -> None:
    from playwright.async_api import expect

    cell = cell_of_page
    service = ApiService(cell, codec(), reasoning_parser="think")
    async with served(create_app(service)) as url, opened(browser) as page:
        await page.goto(f"{url}/console")
        await expect(page.locator("#connection")).to_contain_text("live")
        await page.get_by_text("More sampling").click()
        for answer, per_step, max_tokens, stop in (
            # What an answer begins with is held back as long as it might begin a thought.
            ("\n\nHello.", 1, 64, ""),
            ("<th>is", 1, 64, ""),
            ("<th>is", 3, 64, ""),
            ("<think>hm</think>\n\nHello.", 3, 64, ""),
            ("<think>hm", 1, 3, ""),
            # What might have become a stop string is told of by no step.
            ("<th>is and that", 3, 64, "that one"),
        ):
            tokens = [*ids(answer), *codec().eos_ids]
            cell.script, cell.per_step = partial(_said, tokens), per_step
            await page.locator("[name=max_tokens]").fill(str(max_tokens))
            await page.locator("[name=stop]").fill(stop)
            await page.locator("#send").click()
            await expect(page.locator("#answer-status")).to_contain_text("done: ")
            shown = codec().decode(ids(answer)[:max_tokens])
            assert await page.locator("#answer").text_content() == shown


@pytest.mark.thorough
@needs_chromium
@in_browser
async def test_steps_that_come_at_once_are_laid_out_once(browser: Browser, cell_of_page: CellStandIn) -> None:
    """Each of thousands of tokens by itself took seconds for every second of the answer."""
    service = ApiService(cell_of_page, codec())
    async with served(guarded(service)) as url, opened(browser) as page:
        await page.goto(f"{url}/console")
        session = await page.context.new_cdp_session(page)
        await session.send("Performance.enable")

        async def num_layouts() -> float:
            told = (await session.send("Performance.getMetrics"))["metrics"]
            return float(next(one["value"] for one in told if one["name"] == "LayoutCount"))

        before = await num_layouts()
        from_the_end = await page.evaluate(
            """async () => {
              const { AnswerView } = await import("/console/answer.js");
              const view = new AnswerView(() => {});
              view.clear();
              for (let index = 0; index < 400; index++) {
                view.append([{ text: `token ${index}, `, index, drafter: null }]);
              }
              view.follow();
              return view.box.scrollHeight - view.box.scrollTop - view.box.clientHeight;
            }"""
        )
        assert await num_layouts() - before < 100
        assert from_the_end < 2


@needs_chromium
@in_browser
async def test_what_is_wrong_with_a_folded_field_is_told_at_it(
    browser: Browser, cell_of_page: CellStandIn
) -> None:
    """Nothing happened on a click: the browser has nowhere to say what it holds against the field."""
    from playwright.async_api import expect

    async with served(create_app(ApiService(cell_of_page, codec()))) as url, opened(browser) as page:
        await page.goto(f"{url}/console")
        summary, folded = page.get_by_text("More sampling"), page.locator("details:not([open])")
        for name, value, is_sent in (("top_p", "5", False), ("stop", "x" * 300, True)):
            await summary.click()
            await page.locator(f"[name={name}]").fill(value)
            await summary.click()
            await expect(folded).to_have_count(1)
            await page.locator("#send").click()
            await expect(page.locator(f"[name={name}]")).to_be_focused()
            await expect(page.locator("#error")).to_be_visible(visible=is_sent)
            await page.locator(f"[name={name}]").fill("")
            await summary.click()
        assert cell_of_page.submissions == []
        # Of a chat the refusal says `messages`.
        await page.locator("#prompt").fill("too long " * 500)
        await page.locator("#send").click()
        await expect(page.locator("#error")).to_contain_text("`messages`")
        await expect(page.locator("#prompt")).to_be_focused()


@needs_chromium
@in_browser
async def test_the_axis_tells_the_numbers_it_shows(browser: Browser, cell_of_page: CellStandIn) -> None:
    async with served(create_app(ApiService(cell_of_page, codec()))) as url, opened(browser) as page:
        await page.goto(f"{url}/console")
        told = await page.evaluate(
            """async () => {
              const { showPace } = await import("/console/charts.js");
              return [4, 12, 0.6, 0.03, 0.001, 20, 1200].map((tpot_ms) => {
                showPace({ objective: { tpot_ms }, pace: [[0, tpot_ms / 2], [9, tpot_ms / 2]] });
                const ticks = [...document.querySelectorAll("#pace .tick")].slice(1, 3);
                return ticks.map((tick) => Number(tick.textContent.replace(",", "")));
              });
            }"""
        )
        tops = [5, 15, 0.8, 0.04, 0.0015, 30, 1500]
        assert told == [[top / 2, top] for top in tops]


@needs_chromium
@in_browser
async def test_every_objective_of_a_tier_is_judged(browser: Browser, cell_of_page: CellStandIn) -> None:
    """A tier's whole answers were late by its counts, and each of them attained by its own figures."""
    from playwright.async_api import expect

    tiers = {"whole": TierConfig(tpot_ms=1000, e2e_ms=1)}
    service = ApiService(cell_of_page, codec(), tiers=tiers)
    async with served(create_app(service)) as url, opened(browser) as page:
        await page.goto(f"{url}/console")
        await page.locator("#tier").select_option("whole")
        await page.locator("[name=tpot_ms]").fill("")
        await page.locator("#send").click()
        await expect(page.locator("[data-figure=tpot]")).to_contain_text("attained")
        await expect(page.locator("[data-figure=e2e]")).to_contain_text("objective 1 ms")
        await expect(page.locator("[data-figure=e2e]")).to_contain_text("missed")


@needs_chromium
@in_browser
async def test_an_answer_that_breaks_off_is_told_from_a_server_that_is_away(
    browser: Browser, cell_of_page: CellStandIn
) -> None:
    from playwright.async_api import expect

    app, cell_of_page.pause_s = create_app(ApiService(cell_of_page, codec())), 0.2

    async def cut_off(scope: Scope, receive: Receive, send: Send) -> None:
        """A connection that is lost after some pieces of an answer."""
        num_pieces = 0

        async def lossy(message: Message) -> None:
            nonlocal num_pieces
            num_pieces += message["type"] == "http.response.body"
            if num_pieces == 4 and scope["method"] == "POST":
                raise ConnectionError("lost")
            await send(message)

        with contextlib.suppress(ConnectionError):
            await app(scope, receive, lossy)

    async with served(cut_off) as url, opened(browser) as page:
        await page.goto(f"{url}/console")
        await expect(page.locator("#connection")).to_contain_text("live")
        await page.locator("#send").click()
        await expect(page.locator("#error")).to_contain_text("The answer ended early")
        await expect(page.locator("#answer .token").first).to_be_visible()
        await page.route("**/v1/**", lambda route: route.abort("connectionrefused"))
        await page.locator("#send").click()
        await expect(page.locator("#error")).to_have_text("The server cannot be reached.")


@needs_chromium
@in_browser
async def test_the_focus_stays_where_something_can_be_done(
    browser: Browser, cell_of_page: CellStandIn
) -> None:
    """A button that was switched off by its own use took it along: a keyboard had to find its way anew."""
    from playwright.async_api import expect

    # Longer than any of what follows takes.
    cell_of_page.script, cell_of_page.pause_s = partial(_said, ids(ANSWER) * 9), 0.3
    async with served(create_app(ApiService(cell_of_page, codec()))) as url, opened(browser) as page:
        await page.goto(f"{url}/console")
        await page.locator("#send").press("Enter")
        await expect(page.locator("#answer")).to_be_focused()
        await expect(page.locator("#step-label")).to_contain_text(re.compile(r"^([2-9]|\d\d) of"))
        await page.locator("#stop").press("Enter")
        await expect(page.locator("#answer-status")).to_have_text("stopped")
        await expect(page.locator("#answer")).to_be_focused()
        await page.locator("#step").press("Home")
        await expect(page.locator("#previous")).to_be_disabled()
        await page.locator("#step").press("End")
        for _ in range(await page.locator("#step").evaluate("slider => slider.max - 1")):
            await page.locator("#previous").press("Enter")
        await expect(page.locator("#previous")).to_be_disabled()
        await expect(page.locator("#step")).to_be_focused()


@needs_chromium
@in_browser
async def test_the_seed_of_an_answer_stays_and_is_the_one_typed(
    browser: Browser, cell_of_page: CellStandIn
) -> None:
    from playwright.async_api import expect

    async with served(create_app(ApiService(cell_of_page, codec()))) as url, opened(browser) as page:
        await page.goto(f"{url}/console")
        await page.locator("#send").click()
        await expect(page.locator("#answer-status")).to_contain_text("done: ")
        # The status line tells of the token pointed at from then on.
        await page.locator("#answer .token").first.click()
        await expect(page.locator("[data-figure=seed]")).to_contain_text(re.compile(r"\d"))
        # JavaScript would send another number than the first.
        for wrong in ("9007199254740993", "-9007199254740993", "1.5"):
            await page.locator("[name=seed]").fill(wrong)
            await page.locator("#send").click()
            assert await page.locator("[name=seed]").evaluate("field => field.matches(':invalid')")
        largest = (1 << 53) - 1
        await page.locator("[name=seed]").fill(str(largest))
        await page.locator("#send").click()
        await expect(page.locator("[data-figure=seed]")).to_contain_text(str(largest))
        assert [one.sampling.seed for one in cell_of_page.submissions][1:] == [largest]


@needs_chromium
@in_browser
async def test_requests_in_the_background_are_shown(browser: Browser, cell_of_page: CellStandIn) -> None:
    """Cells count them by themselves: one that was full of them looked idle."""
    from playwright.async_api import expect

    stats = {"running": 1.0, "waiting": 2.0, "max_running": 64.0, "background_running": 6.0}
    stats |= {"kv_slots": 1000.0, "kv_use": 0.03, "background_kv_use": 0.94}
    members = (Member(kind="cell", id="one", node="here", stats=stats),)
    service = ApiService(cell_of_page, codec())
    app = create_app(service, console=ConsoleState(service, Asked(), lambda: members))
    async with served(app) as url, opened(browser) as page:
        await page.goto(f"{url}/console")
        figures = page.locator("[data-cell=one] dd")
        await expect(figures.nth(0)).to_have_text("7 of 64 (background 6)")
        await expect(figures.nth(1)).to_contain_text("2, ")
        use = page.locator("[data-cell=one] .pair > div").first
        await expect(use).to_contain_text("KV cache 97 % of 1,000 tokens (background 94 %)")
        await expect(use.locator(".bar.bad")).to_have_attribute("aria-valuenow", "0.970")


@needs_chromium
@in_browser
async def test_long_names_push_nothing_out_of_the_window(browser: Browser, cell_of_page: CellStandIn) -> None:
    from playwright.async_api import expect

    long, tier = "a_name_without_a_place_to_break_it_" * 4, "t" * 60
    cell_of_page.drafters = [long, "lookup"]
    service = ApiService(cell_of_page, codec(), tiers={tier: TierConfig(tpot_ms=10)})

    async def exposition() -> str:
        return EXPOSITION.replace('"small"', f'"{long}"').replace('"fast"', f'"{tier}"').replace('"b"', '"a"')

    app = create_app(service, console=ConsoleState(service, exposition))
    async with served(app) as url, opened(browser) as page:
        await page.goto(f"{url}/console")
        await expect(page.locator("#pool tbody th")).to_contain_text(long)
        for width in (1280, 700, 390, 320):
            await page.set_viewport_size({"width": width, "height": 900})
            assert await page.evaluate("() => document.documentElement.scrollWidth") <= width
            words = await page.locator("label[for=tier]").evaluate(
                """label => {
                  const range = document.createRange();
                  range.selectNode(label.firstChild);
                  return range.getClientRects().length;
                }"""
            )
            assert words == 1, "the word before the choice is broken"
            hidden = await page.locator("#pool").evaluate("box => box.scrollWidth - box.clientWidth")
            assert hidden <= (0 if width > 390 else 40)


@needs_chromium
@in_browser
async def test_the_tier_chosen_stays_when_others_come(browser: Browser, cell_of_page: CellStandIn) -> None:
    from playwright.async_api import expect

    tiers = {"fast": TierConfig(tpot_ms=10)}
    service = ApiService(cell_of_page, codec(), tiers=tiers)
    async with served(create_app(service)) as url, opened(browser) as page:
        await page.goto(f"{url}/console")
        await page.locator("#tier").select_option("fast")
        state = ApiService(cell_of_page, codec(), tiers={"slow": TierConfig(), **tiers})
        other = (await ConsoleState(state, Asked()).json()).decode()
        await page.route("**/console/state", lambda route: route.fulfill(body=other))
        await expect(page.locator("#tier option")).to_have_count(3)
        await expect(page.locator("#tier")).to_have_value("fast")
