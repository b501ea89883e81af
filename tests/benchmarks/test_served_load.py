"""Figures of a closed loop, of what clients saw and what the cell counted between two scrapes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.live_system import Scrape
from benchmarks.load_client import Outcome
from benchmarks.prompts import Prompt
from benchmarks.served_load import differences, figures
from benchmarks.workload import BenchRequest
from tests.benchmarks.fake_server import FakeServer, serving


def scrape(steps: int, accepted: int) -> Scrape:
    """Of a cell that has made so many steps of 10 ms, each with 2 requests."""
    return Scrape.of(
        f"""
flotilla_steps_total {steps}
flotilla_step_seconds_sum {0.010 * steps}
flotilla_step_seconds_count {steps}
flotilla_verify_call_seconds_sum {0.004 * steps}
flotilla_verify_call_seconds_count {steps}
flotilla_draft_call_seconds_sum{{drafter="general"}} {0.002 * steps}
flotilla_draft_call_seconds_count{{drafter="general"}} {steps}
flotilla_step_phase_seconds_total{{phase="draft"}} {0.002 * steps}
flotilla_step_phase_seconds_total{{phase="verify"}} {0.004 * steps}
flotilla_step_phase_seconds_total{{phase="schedule"}} {0.001 * steps}
flotilla_step_phase_seconds_total{{phase="target"}} {0.001 * steps}
flotilla_step_phase_seconds_total{{phase="other"}} {0.002 * steps}
flotilla_batch_requests_sum{{phase="decode"}} {2 * steps}
flotilla_batch_requests_count{{phase="decode"}} {steps}
flotilla_drafter_tokens_total{{drafter="general",outcome="accepted"}} {accepted}
flotilla_drafter_tokens_total{{drafter="general",outcome="verified"}} {2 * accepted}
"""
    )


def answer(tokens: int, error: str = "") -> Outcome:
    """One that took 20 ms to its first token, and 5 ms for each after it."""
    request = BenchRequest(index=0, prompt=Prompt("code", text="x"), max_tokens=96)
    end_ms = 20.0 + 5.0 * (tokens - 1)
    return Outcome(request, ttft_ms=20.0, e2e_ms=end_ms, num_output_tokens=tokens, error=error)


def test_only_what_grew_between_the_scrapes_counts() -> None:
    outcomes = [answer(40), answer(20), answer(60), answer(0, error="HTTP 503")]
    found = figures("flotilla", 2, 1.5, outcomes, scrape(100, 7), scrape(130, 57))
    assert (found.requests, found.errors, found.steps) == (3, 1, 30)
    assert found.tokens_per_s == pytest.approx(80.0)
    assert (found.step_ms, found.verify_ms) == (pytest.approx(10.0), pytest.approx(4.0))
    assert found.tpot_ms == pytest.approx(5.0)
    assert found.shares == pytest.approx(
        {"draft": 0.2, "verify": 0.4, "target": 0.1, "schedule": 0.1, "other": 0.2}
    )
    assert found.draft_ms == pytest.approx({"general": 2.0})
    assert found.accepted == {"general": 50.0}
    assert found.acceptance == {"general": pytest.approx(0.5)}
    assert found.requests_per_step == pytest.approx(2.0)
    assert found.tokens_per_step == pytest.approx(2.0)


def test_a_loop_in_which_nothing_happened_has_no_means() -> None:
    found = figures("off", 1, 1.0, [], scrape(5, 0), scrape(5, 0))
    assert (found.step_ms, found.tokens_per_step, found.tpot_ms) == (None, None, None)
    assert found.draft_ms == {}


async def test_answers_are_compared_with_plain_ones_asked_alone() -> None:
    """Here chats are another's where drafts are allowed, and completions where several are asked at once."""

    def answer(body: dict[str, Any]) -> list[str]:
        is_plain = (body.get("speculation") or {}).get("mode") == "off"
        asked = str(body.get("messages") or body["prompt"])
        many = " at once" if server.most_at_once > 1 and "messages" not in body else ""
        return [asked + many, "." if is_plain or "messages" not in body else "!"]

    server = FakeServer(answer, pause_s=0.001)
    async with serving(server) as url:
        found = await differences(url, 12, 4, 16)
    assert server.most_at_once == 4
    num_chats = sum("messages" in body for body in server.bodies) // 4
    assert 0 < num_chats < 12
    assert found["drafts, alone"] == num_chats
    assert found["plain, at once"] > 0
    assert found["drafts, at once"] == 12
