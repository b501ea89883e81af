"""The console in a real browser, against a server with real drafters; and the traces it is made of."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.browser import LAUNCH
from tests.system.conftest import Server

PROMPT = 'def read_lines(path):\n    """Return the lines of <b>a</b> file."""\n'
FIELDS: dict[str, Any] = {"max_tokens": 48, "temperature": 0.7, "seed": 7}


def check_traces(server: Server) -> None:
    """Trees are closed under parent and hold the accepted path; texts are the same with and without.

    Where drafts are dear, as on a busy machine, the policy may verify all of one: then others are looked at.
    """
    was_accepted = was_pruned = False
    for seed in range(7, 17):
        steps = _traced(server, {"prompt": PROMPT, "return_token_ids": True, **FIELDS, "seed": seed})
        was_accepted |= any(step["tree"]["accepted"] for step in steps)
        was_pruned |= any(len(step["tree"]["tokens"]) > len(step["tree"]["verified"]) for step in steps)
        if was_accepted and was_pruned:
            return
    raise AssertionError(f"of ten answers: accepted {was_accepted}, verified in part {was_pruned}")


def _traced(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of an answer, whose traces fit each other, and its text."""
    plain = server.post("/v1/completions", body).json()["choices"][0]
    traced = {**body, "stream": True, "logprobs": 0, "speculation": {"trace": True}}
    text, token_ids, steps = "", [], []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=traced, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                text += chunk["choices"][0]["text"]
                token_ids += chunk["choices"][0]["token_ids"]
                steps += [chunk["flotilla"]] if "flotilla" in chunk else []
    assert (text, token_ids) == (plain["text"], plain["token_ids"])
    assert "".join(token["text"] for step in steps for token in step["tokens"]) == text
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    before = None
    for step in steps:
        tree, tokens = step["tree"], [token["id"] for token in step["tokens"]]
        verified = set(tree["verified"])
        assert before is None or tree["tokens"][0] == before
        before = tokens[-1]
        assert tree["parents"][0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(tree["parents"]) if node)
        assert 0 in verified
        assert all(tree["parents"][node] in verified for node in verified - {0})
        assert set(tree["accepted"]) <= verified
        assert [tree["parents"][node] for node in tree["accepted"]] == [0, *tree["accepted"]][:-1]
        accepted = [tree["tokens"][node] for node in tree["accepted"]]
        assert accepted == tokens[: len(accepted)]
        assert [token["drafter"] for token in step["tokens"]] == (
            [step["drafter"]] * len(accepted) + [None] * (len(tokens) - len(accepted))
        )
    return steps


def check_page(server: Server) -> None:
    """It loads without errors and asks nobody else; an answer, its tree, its pace and the cells are shown."""
    from playwright.sync_api import expect, sync_playwright

    wanted = server.complete(PROMPT, **FIELDS)["choices"][0]["text"]
    problems: list[str] = []
    hosts: set[str] = set()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**LAUNCH)
        try:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("requestfailed", lambda request: problems.append(f"{request.url}: {request.failure}"))
            page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
            response = page.goto(f"{server.url}/console")
            assert response is not None
            assert "default-src 'none'" in response.headers["content-security-policy"]
            expect(page.locator("[data-cell]")).to_have_count(1)
            expect(page.locator("#connection")).to_have_text("live")
            for drafter in server.config.drafters:
                row = page.locator("#pool tbody tr").filter(has_text=drafter.name)
                expect(row).to_contain_text("ready")
            requests = page.locator("#totals dd").first
            served = int(requests.inner_text().replace(",", ""))

            page.get_by_text("Completion", exact=True).click()
            page.get_by_label("Prompt", exact=True).fill(PROMPT)
            for name, value in {**FIELDS, "tpot_ms": 500}.items():
                page.locator(f"[name={name}]").fill(str(value))
            page.keyboard.press("Control+Enter")
            expect(page.locator("#answer-status")).to_contain_text("done: ", timeout=60_000)
            expect(page.locator("#error")).to_be_hidden()

            # Text is text: what looks like markup in it is shown as it stands.
            assert page.locator("#answer").text_content() == wanted
            assert page.locator("#answer b").count() == 0
            tokens = page.locator("#answer .token")
            kinds = {drafter.name for drafter in server.config.drafters}
            counts = {
                item.get_attribute("data-drafter"): int(item.locator("b").inner_text())
                for item in page.locator("#legend li").all()
            }
            assert set(counts) == {*kinds, ""}
            assert sum(counts.values()) == tokens.count()
            assert page.locator("#answer .token:not(.own)").count() == sum(counts[kind] for kind in kinds) > 0
            plain, drafted = (
                page.locator(f"#answer .token{kind}").first.evaluate(
                    "(e) => getComputedStyle(e).backgroundColor"
                )
                for kind in (".own", ":not(.own)")
            )
            assert plain != drafted

            # Hover and keyboard tell of a token, and lead to the tree of its step.
            page.locator("#answer .token:not(.own)").first.hover()
            expect(page.locator("#tip")).to_contain_text("token id")
            assert any(kind in page.locator("#tip").inner_text() for kind in kinds)
            page.locator("#answer").focus()
            page.keyboard.press("End")
            expect(page.locator("#tip")).to_contain_text("logprob")
            steps = int(page.locator("#step").get_attribute("max") or 0)
            expect(page.locator("#step-label")).to_have_text(f"{steps} of {steps}")
            page.locator("#answer .token:not(.own)").first.click()
            accepted = page.locator("#tree .node.accepted")
            assert accepted.count() >= 1
            label = page.locator("#tree svg").get_attribute("aria-label") or ""
            assert f"{accepted.count()} accepted" in label
            page.locator("#step").focus()
            before = page.locator("#step-label").inner_text()
            page.keyboard.press("ArrowRight")
            expect(page.locator("#step-label")).not_to_have_text(before)

            # Latency against its objective, and what became of drafts.
            tpot = page.locator("[data-figure=tpot]")
            expect(tpot).to_contain_text("attained")
            assert re.search(r"\d ms", tpot.inner_text())
            expect(page.locator("#pace .objective")).to_have_count(1)
            expect(page.locator("#pace path.line")).to_have_count(1)
            assert page.locator("#acceptance tbody tr").count() >= 1

            # The state is asked for every second.
            expect(requests).to_have_text(f"{served + 1:,}", timeout=10_000)
            expect(page.locator("#tiers")).to_contain_text("default")

            # What the server refuses is told where it can be changed.
            assert not problems, problems
            page.locator("[name=max_tokens]").fill("100000")
            page.locator("#send").click()
            expect(page.locator("#error")).to_be_visible()
            assert "max_tokens" in page.locator("#error").inner_text()
            page.set_viewport_size({"width": 390, "height": 800})
            assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
        finally:
            browser.close()
    # A refusal is a failed resource to the browser; nothing else may be.
    assert all("400" in problem for problem in problems), problems
    assert hosts == {urlsplit(server.url).netloc}
