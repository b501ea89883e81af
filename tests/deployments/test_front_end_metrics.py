"""What a front end counts, whatever clients send."""

from __future__ import annotations

import httpx

from deployments.api_service import ApiService
from deployments.front_end_metrics import FrontEndMetrics
from deployments.openai_api import create_app


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
        line for line in metrics.render().splitlines() if line.startswith("flotilla_http_requests_total{")
    ]
    name = 'flotilla_http_requests_total{front_end="one",method="'
    assert sorted(counted) == [
        f'{name}ANY",route="/v1/models",status="405"}} 5.0',
        f'{name}ANY",route="unknown",status="404"}} 5.0',
        f'{name}GET",route="/v1/models",status="200"}} 1.0',
        f'{name}HEAD",route="/v1/models",status="200"}} 1.0',
    ]
