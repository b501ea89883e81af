"""Bad requests by the hundred: each a 4xx in OpenAI's form that names the field; the server stays well."""

from __future__ import annotations

import httpx
import pytest

from tests.deployments.bad_requests import BASES, BadRequest, bad_requests
from tests.fakes.cell_stand_in import CellStandIn

BAD = list(bad_requests())


def check_refusal(bad: BadRequest, response: httpx.Response) -> None:
    shown = (bad.body[:200], response.text)
    assert 400 <= response.status_code < 500, shown
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}, shown
    assert error["message"], shown
    assert error["type"] == "invalid_request_error", shown
    if bad.field is not None:
        assert str(error["param"]).partition(".")[0] == bad.field, shown
        assert bad.field in error["message"], shown


def test_there_are_enough() -> None:
    assert len(BAD) > 1000
    assert {bad.path for bad in BAD} == set(BASES)
    assert len({(bad.path, bad.body) for bad in BAD}) > 0.95 * len(BAD)


@pytest.mark.parametrize("usual", [True, pytest.param(False, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("path", sorted(BASES))
async def test_each_is_refused_by_name(
    http: httpx.AsyncClient, cell: CellStandIn, path: str, usual: bool
) -> None:
    before = await http.post(path, json=BASES[path])
    assert before.status_code == 200, before.text
    del cell.submissions[:]
    for bad in (bad for bad in BAD if (bad.path, bad.usual) == (path, usual)):
        check_refusal(bad, await http.post(path, content=bad.body))
    assert cell.submissions == []
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/ready")).status_code == 200
    after = await http.post(path, json=BASES[path])
    assert after.json().get("choices") == before.json().get("choices")
    assert after.json().get("tokens") == before.json().get("tokens")
