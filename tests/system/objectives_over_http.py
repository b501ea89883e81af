"""Objectives end to end: headers, multiples, tiers, predictions, downgrades and refusals of a real cell."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.system.conftest import Server

PROMPT = "def read_lines(path):\n    "
NUM_OTHERS = 16


def check_headers_and_multiples(server: Server) -> None:
    """A header that is a multiple and a field that is not."""
    body = {
        "model": server.model,
        "prompt": PROMPT,
        "max_tokens": 32,
        "ignore_eos": True,
        "slo": {"e2e_ms": 60_000},
    }
    sent = server.post("/v1/completions", body, headers={"x-llm-d-slo-tpot-ms": "40x"})
    answer: dict[str, Any] = sent.json()
    num_prompt = answer["usage"]["prompt_tokens"]
    tiers = httpx.get(f"{server.url}/v1/tiers?prompt_tokens={num_prompt}&max_tokens=32", timeout=30).json()
    slo, metrics = answer["metrics"]["slo"], answer["metrics"]
    assert abs(slo["tpot_ms"] - 40 * tiers["baseline"]["tpot_ms"]) < 0.05
    assert (slo["e2e_ms"], slo["ttft_ms"], slo["met"]) == (60_000, None, True)
    assert {tier["id"] for tier in tiers["data"]} == {"default", *server.config.tiers}
    assert all(0.1 < metrics["predicted"][name] < 60_000 for name in ("ttft_ms", "tpot_ms", "e2e_ms"))
    assert sent.headers["server-timing"].startswith("queue;dur=")


def check_downgrade(server: Server) -> None:
    """The tier `strict` cannot be had, and goes down to `bulk`."""
    answer = server.complete(PROMPT, service_tier="strict", max_tokens=8)
    assert answer["metrics"]["tier"] == {"asked": "strict", "served": "bulk", "downgraded": True}
    assert answer["service_tier"] == "bulk"
    assert answer["metrics"]["slo"]["e2e_ms"] is None
    kept = server.complete(PROMPT, service_tier="strict", max_tokens=8, slo={"on_miss": "serve"})
    assert kept["metrics"]["tier"]["served"] == "strict"
    assert kept["metrics"]["slo"]["met"] is False
    assert kept["choices"] == answer["choices"]


def prompt(number: int) -> list[int]:
    """Some hundred tokens that no other prompt begins with."""
    return [17 + number, *range(20, 320)]


def check_refusals(server: Server) -> None:
    """What nobody could meet is a 400; what is missed only behind many other prompts is a 429."""
    body = {"model": server.model, "prompt": PROMPT, "max_tokens": 20, "ignore_eos": True}
    never = server.post("/v1/completions", {**body, "slo": {"e2e_ms": 1, "on_miss": "reject"}})
    assert never.status_code == 400
    assert never.json()["error"]["code"] == "slo_infeasible"
    assert never.json()["error"]["predicted"]["e2e_ms"] > 1

    alone = server.complete(prompt(0), max_tokens=4)["metrics"]["predicted"]["ttft_ms"]
    slo = {"ttft_ms": 3 * alone, "on_miss": "reject"}

    def other(number: int) -> None:
        """A request with a prompt of its own, given up as soon as it is answered."""
        long = {**body, "prompt": prompt(number), "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=long, timeout=60) as stream:
            next(stream.iter_lines())

    with ThreadPoolExecutor(NUM_OTHERS) as pool:
        others = [pool.submit(other, number) for number in range(1, NUM_OTHERS + 1)]
        time.sleep(0.3)
        refused = server.post("/v1/completions", {**body, "prompt": prompt(99), "slo": slo})
        assert [future.result() for future in others] == [None] * NUM_OTHERS
    assert refused.status_code == 429, refused.text
    error = refused.json()["error"]
    assert (error["code"], error["type"], error["param"]) == ("saturated", "rate_limit_error", "slo")
    assert error["predicted"]["ttft_ms"] > 3 * alone
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
