"""What a front end counts, whatever clients send."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.metric_catalog import REFUSALS
from cluster.security_config import SecurityConfig
from deployments.api_keys import hash_key
from deployments.api_service import ApiService
from deployments.authentication import Authenticator
from deployments.front_end_metrics import FrontEndMetrics
from deployments.openai_api import create_app
from tests.deployments.socket_server import served
from tests.fakes.cell_stand_in import CellStandIn, eventually


async def test_clients_make_no_series_of_their_own(service: ApiService) -> None:
    metrics = FrontEndMetrics("one")
    transport = httpx.ASGITransport(app=create_app(service, metrics=metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://cell") as http:
        assert (await http.get("/v1/models")).status_code == 200
        assert (await http.head("/v1/models")).status_code == 200
        for number in range(5):
            assert (await http.request(f"MADEUP{number}", "/v1/models")).status_code == 405
            assert (await http.get(f"/made/up/{number}")).status_code == 404
    counted = [
        line
        for line in metrics.render().splitlines()
        if line.startswith("flotilla_http_requests_total{") and not line.endswith(" 0.0")
    ]
    name = 'flotilla_http_requests_total{front_end="one",method="'
    assert sorted(counted) == [
        f'{name}ANY",route="/v1/models",status="405"}} 5.0',
        f'{name}ANY",route="unknown",status="404"}} 5.0',
        f'{name}GET",route="/v1/models",status="200"}} 1.0',
        f'{name}HEAD",route="/v1/models",status="200"}} 1.0',
    ]


async def test_requests_that_all_fail_at_once_are_seen_to_have_failed(
    service: ApiService, cell: CellStandIn
) -> None:
    """Of a series that begins with its value, Prometheus sees no increase: not that of the alert either."""
    metrics = FrontEndMetrics("one")

    def failures() -> dict[str, float]:
        """As a scrape finds them, by series."""
        return {
            str((sample.name, sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(metrics.render())
            for sample in family.samples
            if sample.name in ("flotilla_http_requests_total", "flotilla_http_streams_failed_total")
            and sample.labels["status"].startswith("5")
        }

    before = failures()
    transport = httpx.ASGITransport(app=create_app(service, metrics=metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://cell") as http:
        cell.per_step, cell.pause_s = 1, 0.2
        body = {"prompt": "a", "max_tokens": 200}
        asked = [
            asyncio.create_task(http.post("/v1/completions", json={**body, "stream": is_stream}))
            for is_stream in (False, True)
        ]
        await eventually(
            lambda: len(cell.submissions) == 2 and metrics.streams.collect()[0].samples[0].value == 1
        )
        await service.client.close()
        statuses = [(await one).status_code for one in asked]
    assert statuses == [503, 200]
    after = failures()
    assert sum(after[series] - value for series, value in before.items()) == 2.0


async def test_who_lacks_a_key_is_counted_where_he_wanted_to_go(service: ApiService) -> None:
    metrics = FrontEndMetrics("one")
    authenticator = Authenticator(
        SecurityConfig(key_hash=hash_key("a-key-that-is-long-enough")), environment={}
    )
    app = create_app(service, metrics=metrics, authenticator=authenticator)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://cell") as http:
        for path in ("/v1/completions", "/made/up"):
            assert (await http.post(path, json={})).status_code == 401
        assert (await http.request("MADEUP", "/v1/completions")).status_code == 401
    counted = [line for line in metrics.render().splitlines() if 'status="401"' in line]
    name = 'flotilla_http_requests_total{front_end="one",method="'
    assert sorted(counted) == [
        f'{name}ANY",route="/v1/completions",status="401"}} 1.0',
        f'{name}ANY",route="unknown",status="401"}} 1.0',
        f'{name}POST",route="/v1/completions",status="401"}} 1.0',
    ]


@pytest.mark.parametrize(
    ("error", "status", "code"), [("", "500", "cell_error"), ("no way on", "400", "invalid_constraint")]
)
@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "once"}])
async def test_a_stream_that_fails_is_told_by_the_status_it_could_not_have(
    service: ApiService, cell: CellStandIn, error: str, status: str, code: str, headers: dict[str, str]
) -> None:
    metrics = FrontEndMetrics("one")
    app = create_app(service, metrics=metrics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://cell") as http:
        for cell.finish_reason, cell.error in ((None, ""), ("error", error)):
            body = {"prompt": "hi", "max_tokens": 4, "stream": True}
            answer = await http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
            assert ("event: error" in answer.text) == (cell.finish_reason == "error")
            headers = headers and {"Idempotency-Key": "another"}
    await app.state.answers.close()
    text = metrics.render()
    streams = [line for line in text.splitlines() if line.startswith("flotilla_http_streams_failed_total{")]
    failed = [line for line in streams if not line.endswith(" 0.0")]
    assert failed == [
        'flotilla_http_streams_failed_total{front_end="one",route="/v1/completions",status="'
        + status
        + '"} 1.0'
    ]
    assert f'flotilla_request_errors_total{{api="http",code="{code}",front_end="one"}} 1.0' in text
    assert 'status="200"} 2.0' in text


async def test_a_stream_fails_for_everybody_who_follows_it(service: ApiService, cell: CellStandIn) -> None:
    """Also where the one that it was begun for is gone, and another has come back for it."""
    cell.pause_s, cell.finish_reason = 0.2, "error"
    metrics = FrontEndMetrics("one")
    app = create_app(service, metrics=metrics)
    body, key = {"prompt": "hi", "max_tokens": 9, "stream": True}, {"Idempotency-Key": "once"}
    async with served(app) as url, httpx.AsyncClient() as http:

        async def ask() -> str:
            return (await http.post(f"{url}/v1/completions", json=body, headers=key)).text

        first = asyncio.create_task(ask())
        await eventually(lambda: len(cell.submissions) == 1)
        others = [asyncio.create_task(ask()) for _ in range(2)]
        await asyncio.sleep(0.1)
        first.cancel()
        for answer in await asyncio.gather(*others):
            assert "event: error" in answer
    assert len(cell.submissions) == 1
    text = metrics.render()
    assert 'route="/v1/completions",status="500"} 2.0' in text
    assert 'flotilla_request_errors_total{api="http",code="cell_error",front_end="one"} 2.0' in text


async def test_a_stream_that_takes_too_long_has_failed(service: ApiService, cell: CellStandIn) -> None:
    cell.pause_s = 0.05
    metrics = FrontEndMetrics("one")
    app = create_app(service, metrics=metrics, request_timeout_s=0.2)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://cell") as http:
        await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 100, "stream": True})
    assert 'route="/v1/completions",status="504"} 1.0' in metrics.render()


def test_refusals_are_told_from_zero_on_and_as_they_come() -> None:
    refused: Counter[tuple[str, str]] = Counter()
    metrics = FrontEndMetrics("one", num_rejected=lambda: refused, tiers=["bulk"])

    def told() -> dict[tuple[str, str], float]:
        return {
            (sample.labels["code"], sample.labels["tier"]): sample.value
            for family in text_string_to_metric_families(metrics.render())
            for sample in family.samples
            if sample.name == "flotilla_front_end_requests_rejected_total"
        }

    assert told() == dict.fromkeys(itertools.product(REFUSALS, ("default", "bulk")), 0.0)
    for _ in range(2):
        refused["queue_full", "bulk"] += 3
        refused["prompt_too_long", "default"] += 1
        assert told()["queue_full", "bulk"] == refused["queue_full", "bulk"]
    assert told()["prompt_too_long", "default"] == 2
    assert told()["saturated", "bulk"] == 0
