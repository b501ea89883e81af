"""`GET /v1/tiers`: the service tiers, and the latencies that relative objectives are multiples of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from cluster.baseline import Baseline
from cluster.tier_config import DEFAULT_TIER, TierConfig
from deployments.api_service import ApiService
from deployments.errors import bad_request
from deployments.key_gate import grant_of

#: Lengths that baselines are told for unless the client names others.
NUM_PROMPT, NUM_OUTPUT = 512, 128
_MOST_TOKENS = 1 << 24


def add_tier_routes(app: FastAPI, service: ApiService) -> None:
    """Add the route to an application."""

    @app.get("/v1/tiers")
    async def tiers(request: Request) -> Response:
        """Tiers and baselines, of `?prompt_tokens=` and `?max_tokens=`."""
        num_prompt = _count(request, "prompt_tokens", NUM_PROMPT)
        num_output = _count(request, "max_tokens", NUM_OUTPUT)
        baseline = (await service.info(waits=True)).baseline
        grant = grant_of(request.scope)
        body = {
            "object": "list",
            "data": tier_list(service.tiers, None if grant is None else grant.tiers),
            "baseline": None if baseline is None else latencies(baseline, num_prompt, num_output),
        }
        return Response(msgspec.json.encode(body), media_type="application/json")


def tier_list(
    tiers: Mapping[str, TierConfig], allowed: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Every tier as it is configured, the default one first; of a key that may ask for some only, those."""
    known = {DEFAULT_TIER: tiers.get(DEFAULT_TIER, TierConfig()), **tiers}
    return [
        {
            "id": name,
            "object": "tier",
            "slo": {"tpot_ms": tier.tpot_ms, "ttft_ms": tier.ttft_ms, "e2e_ms": tier.e2e_ms},
            "priority": tier.priority,
            "on_miss": tier.miss_rule,
            "downgrade_to": tier.downgrade_to,
        }
        for name, tier in known.items()
        if allowed is None or name in allowed
    ]


def latencies(baseline: Baseline, num_prompt: int, num_output: int) -> dict[str, float]:
    """What the cell takes for one request by itself without speculation, in milliseconds."""
    return {
        "prompt_tokens": num_prompt,
        "max_tokens": num_output,
        "tpot_ms": round(baseline.tpot_ms(num_prompt), 3),
        "ttft_ms": round(baseline.ttft_ms(num_prompt), 3),
        "e2e_ms": round(baseline.e2e_ms(num_prompt, num_output), 3),
    }


def _count(request: Request, name: str, default: int) -> int:
    asked = request.query_params.get(name)
    if asked is None:
        return default
    if not (asked.isascii() and asked.isdigit() and len(asked) < 9 and 1 <= int(asked) <= _MOST_TOKENS):
        raise bad_request(f"`{name}` must be a whole number of tokens, 1 to {_MOST_TOKENS}.", name)
    return int(asked)
