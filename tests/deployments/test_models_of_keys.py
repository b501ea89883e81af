"""Keys that may ask some of the models only see no others, over HTTP and gRPC."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from deployments.api_service import ApiService
from deployments.authentication import Authenticator
from deployments.errors import ApiError
from deployments.grpc_service import GenerationService
from deployments.proto.flotilla.v1 import generation_pb2 as pb
from tests.deployments.test_api_adapters import BODIES, COUNTS
from tests.deployments.test_authentication import KEYS, app, authenticator, bearer, clock
from tests.fakes.cell_stand_in import CellStandIn

__all__ = ["app", "authenticator", "clock"]  # fixtures

#: Ids that each key sees of the target `demo` and its adapters `terse` and `verbose`.
SEEN = {"plain": ["demo", "terse", "verbose"], "terse": ["terse"], "target": ["demo"], "nothing": []}


@pytest.fixture(autouse=True)
def adapters(cell: CellStandIn) -> None:
    cell.adapters = {"terse": "/adapters/terse", "verbose": "/adapters/verbose"}


@pytest.fixture
def http(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.mark.parametrize("key", SEEN)
async def test_a_key_is_told_of_the_models_it_may_ask(http: httpx.AsyncClient, key: str) -> None:
    seen = SEEN[key]
    listed = (await http.get("/v1/models", headers=bearer(key))).json()
    assert [one["id"] for one in listed["data"]] == seen
    assert (listed["first_id"], listed["last_id"]) == ((seen[0], seen[-1]) if seen else (None, None))
    for model in ("demo", "terse", "verbose"):
        answer = await http.get(f"/v1/models/{model}", headers=bearer(key))
        assert answer.status_code == (200 if model in seen else 404)


@pytest.mark.parametrize("key", SEEN)
@pytest.mark.parametrize("path", BODIES | COUNTS)
async def test_other_models_are_not_there(
    http: httpx.AsyncClient, cell: CellStandIn, key: str, path: str
) -> None:
    seen = SEEN[key]
    body = (BODIES | COUNTS)[path]
    for model in ("demo", "terse", "verbose", None):
        named = {} if model is None else {"model": model}
        before = len(cell.submissions)
        answer = await http.post(path, json=body | named, headers=bearer(key))
        if (model or "demo") in seen:
            assert answer.status_code == 200, answer.text
            continue
        assert answer.status_code == 404
        assert len(cell.submissions) == before
        told = answer.json()["error"]["message"]
        assert told.startswith(
            "No `model` is named" if model is None else f"The model '{model}' does not exist"
        )
        assert not any(
            f"'{other}'" in told for other in ("demo", "terse", "verbose") if other not in [*seen, model]
        )


async def test_the_same_over_grpc(service: ApiService, authenticator: Authenticator) -> None:
    grpc = GenerationService(service, authenticator=authenticator)
    for key, seen in SEEN.items():
        metadata = {"authorization": f"Bearer {KEYS[key]}"}
        assert [one.id for one in (await grpc.list_models(metadata)).models] == seen
        described = await grpc.describe(metadata)
        assert (described.ready, described.model.id) == (True, seen[0] if seen else "")
        for model in ("demo", "terse"):
            asked = pb.GenerateRequest(prompt="hi", model=model, max_tokens=4)
            if model in seen:
                assert (await grpc.generate(asked, metadata)).model == model
            else:
                with pytest.raises(ApiError, match="does not exist here") as refused:
                    await grpc.generate(asked, metadata)
                assert refused.value.status == 404
