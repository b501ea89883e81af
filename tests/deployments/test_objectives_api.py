"""Objectives over HTTP: what the cell is told, what a client is told, and the receipt."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import msgspec
import pytest

from cluster.baseline import Baseline
from cluster.stream_messages import Objective, Prediction, Receipt, Rejected, Terms
from deployments.receipts import ChoiceOutcome, metrics
from tests.fakes.cell_stand_in import CellStandIn

COMPLETIONS = "/v1/completions"


async def told(
    http: httpx.AsyncClient, cell: CellStandIn, headers: object = None, **body: object
) -> Objective:
    sent = {"prompt": [5] * 20, "max_tokens": 10, **body}
    response = await http.post(COMPLETIONS, json=sent, headers=headers)  # type: ignore[arg-type]
    assert response.status_code == 200, response.text
    return cell.submissions[-1].objective


async def baseline(cell: CellStandIn) -> Baseline:
    described = (await cell.describe())["baseline"]
    return msgspec.convert(described, Baseline)


async def test_headers_body_and_tier_meet_in_what_the_cell_is_told(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    headers = {"X-LLM-D-SLO-TTFT-MS": "250", "x-slo-tpot-ms": "1.5x"}
    objective = await told(http, cell, headers, service_tier="fast", slo={"ttft_ms": 300})
    assert objective == Objective(ttft_ms=300.0, tpot_ms=pytest.approx(1.5 * 12.0))  # type: ignore[arg-type]
    assert await told(http, cell, service_tier="fast") == Objective(tpot_ms=10.0, ttft_ms=100.0)
    objective = await told(http, cell, slo={"e2e_ms": "2x", "on_miss": "reject"})
    one = await baseline(cell)
    assert objective.e2e_ms == pytest.approx(2 * one.e2e_ms(20, 10))
    assert cell.submissions[-1].on_miss == "reject"


@pytest.mark.parametrize(
    ("headers", "slo", "param"),
    [
        ({"x-llm-d-slo-tpot-ms": "soon"}, None, "x-llm-d-slo-tpot-ms"),
        ({"x-slo-ttft-ms": "-5"}, None, "x-slo-ttft-ms"),
        ({"x-slo-ttft-ms": "5", "x-llm-d-slo-ttft-ms": "6"}, None, "x-slo-ttft-ms"),
        ({}, {"tpot_ms": "1.2"}, "slo.tpot_ms"),
        ({}, {"tpot_ms": True}, "slo.tpot_ms"),
        ({}, {"tpot_ms": [1]}, "slo.tpot_ms"),
        ({}, {"e2e_ms": 0}, "slo.e2e_ms"),
        ({}, {"e2e_ms": 10**400}, "slo.e2e_ms"),
        ({}, {"e2e_ms": 10, "ttft_ms": 20}, "slo.ttft_ms"),
        ({}, {"on_miss": "hope"}, "slo.on_miss"),
        ({}, {"on_miss": "downgrade"}, "slo.on_miss"),
    ],
)
async def test_nonsense_is_a_400_that_names_its_place(
    http: httpx.AsyncClient, cell: CellStandIn, headers: dict[str, str], slo: object, param: str
) -> None:
    response = await http.post(COMPLETIONS, json={"prompt": "a", "slo": slo}, headers=headers)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
    assert not cell.submissions


async def test_a_refusal_tells_the_prediction_and_when_to_come_back(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    predicted = Prediction(ttft_ms=900.0, tpot_ms=41.5, e2e_ms=2000.0)
    cell.reject = Rejected(
        request_id="", code="saturated", message="too late", retry_after_s=6.2, predicted=predicted
    )
    response = await http.post(COMPLETIONS, json={"prompt": "a", "slo": {"tpot_ms": 30, "on_miss": "reject"}})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "7"
    assert response.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
    error = response.json()["error"]
    assert (error["code"], error["type"], error["param"]) == ("saturated", "rate_limit_error", "slo")
    assert error["predicted"] == {"ttft_ms": 900.0, "tpot_ms": 41.5, "e2e_ms": 2000.0}


async def test_times_are_also_a_header(http: httpx.AsyncClient) -> None:
    response = await http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 4})
    parts = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    assert parts.keys() == {"queue", "ttft", "decode", "total"}
    assert float(parts["total"]) == response.json()["metrics"]["e2e_ms"]


async def test_tiers_are_listed_with_the_baseline(http: httpx.AsyncClient, cell: CellStandIn) -> None:
    body = (await http.get("/v1/tiers?prompt_tokens=20&max_tokens=10")).json()
    assert [tier["id"] for tier in body["data"]] == ["default", "fast"]
    assert body["data"][1]["slo"] == {"tpot_ms": 10.0, "ttft_ms": 100.0, "e2e_ms": None}
    assert body["data"][1]["on_miss"] == "serve"
    one = await baseline(cell)
    assert body["baseline"]["e2e_ms"] == pytest.approx(one.e2e_ms(20, 10))
    began = time.thread_time()
    long = (await http.get("/v1/tiers?prompt_tokens=16777216")).json()["baseline"]
    assert time.thread_time() - began < 1.0, "all streams of the front end stood still meanwhile"
    assert long["ttft_ms"] > 16777216 * 1e3 * one.target.gamma
    wrong = await http.get("/v1/tiers?prompt_tokens=many")
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "prompt_tokens"


def outcome(terms: Terms | None, tpot_ms: float, predicted_ms: float) -> ChoiceOutcome:
    receipt = Receipt(
        queue_ms=1.0,
        ttft_ms=50.0,
        tpot_ms=tpot_ms,
        e2e_ms=500.0,
        num_prompt_tokens=3,
        num_cached_tokens=0,
        num_output_tokens=10,
        num_steps=5,
        num_drafted=0,
        num_verified=0,
        num_accepted=0,
        drafters={},
        num_preemptions=0,
        terms=terms,
        predicted=Prediction(ttft_ms=40.0, tpot_ms=predicted_ms, e2e_ms=400.0),
    )
    return ChoiceOutcome(3, 10, receipt, 50.0, 500.0, tpot_ms)


def test_a_downgraded_request_is_held_against_what_it_was_served_on() -> None:
    asked = Objective(tpot_ms=10.0)
    lower = Terms(tier="bulk", objective=Objective(tpot_ms=80.0, e2e_ms=400.0), priority=5)
    receipt = metrics([outcome(lower, 60.0, 55.0)], asked, 0, "gold")
    assert receipt["tier"] == {"asked": "gold", "served": "bulk", "downgraded": True}
    assert receipt["slo"]["tpot_ms"] == 80.0
    assert receipt["slo"]["tpot_met"] is True
    assert receipt["slo"]["e2e_met"] is False
    assert receipt["slo"]["met"] is False
    assert receipt["slo"]["ttft_met"] is None
    assert receipt["predicted"] == {"ttft_ms": 40.0, "tpot_ms": 55.0, "e2e_ms": 400.0}


def test_each_choice_is_held_against_its_own_objective() -> None:
    def terms(tpot_ms: float) -> Terms:
        return Terms(tier="default", objective=Objective(tpot_ms=tpot_ms))

    slow, quick = outcome(terms(30.0), 25.0, 20.0), outcome(terms(10.0), 12.0, 30.0)
    receipt = metrics([slow, quick], Objective(tpot_ms=30.0), 0)
    assert receipt["slo"]["tpot_met"] is False
    assert receipt["predicted"]["tpot_ms"] == 30.0
    assert metrics([slow, outcome(terms(10.0), 9.0, 1.0)], Objective(), 0)["slo"]["tpot_met"] is True


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_answers_tell_the_tier_that_served(
    http: httpx.AsyncClient, cell: CellStandIn, path: str, usage: bool
) -> None:
    base: dict[str, Any] = {
        "/v1/completions": {"prompt": "a", "n": 2},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/responses": {"input": "a"},
    }[path]
    options = {"stream": True} | ({"stream_options": {"include_usage": True}} if usage else {})
    if path == "/v1/responses":
        options = {"stream": True}
    lower = Terms(tier="bulk")
    for asked, terms, served in (("auto", None, "default"), ("fast", None, "fast"), ("fast", lower, "bulk")):
        cell.terms = terms
        body = base | {"service_tier": asked}
        assert (await http.post(path, json=body)).json()["service_tier"] == served
        response = await http.post(path, json=body | options)
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        bodies = [event.get("response", event) for event in events]
        told = [body["service_tier"] for body in bodies if body.get("service_tier") is not None]
        assert told == [served], "nothing else was told before"
        assert bodies[-1]["service_tier"] == served
    cell.terms = None
    body = (await http.post(path, json=base)).json()
    assert body.get("service_tier") == ("default" if path == "/v1/responses" else None)
