"""Small requests that ask for much: refused before anybody else waits for them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx
import pytest

from deployments import prompt_preparation
from deployments.authentication import MOST_ATTACHED
from deployments.errors import ApiError
from deployments.openai_schema import json_object
from tests.fakes.cell_stand_in import CellStandIn

COMPLETIONS = "/v1/completions"


async def error_of(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, str | None]:
    response = await http.post(COMPLETIONS, json=body)
    return response.status_code, response.json()["error"]["param"] if response.status_code != 200 else None


@pytest.mark.api("completions", "prompt_logprobs", "echo")
async def test_log_probabilities_of_a_prompt_are_no_more_than_a_message_holds(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message of 40 MiB looked like a front end that does not read, one of 80 like a lost worker."""
    monkeypatch.setattr(prompt_preparation, "MOST_PROMPT_LOGPROBS", 60)
    for tokens, most, status in ((10, 5, 200), (10, 6, 400), (60, 0, 200), (61, 0, 400)):
        body = {"prompt": [5] * tokens, "prompt_logprobs": most, "max_tokens": 1}
        assert await error_of(http, body) == (status, None if status == 200 else "prompt_logprobs")
    body = {"prompt": [5] * 61, "echo": True, "logprobs": 0, "max_tokens": 1}
    assert await error_of(http, body) == (400, "logprobs")


@pytest.mark.api("completions", "allowed_token_ids", "n")
async def test_allowed_ids_are_bounded_for_all_choices_together(
    http: httpx.AsyncClient, cell: CellStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_preparation, "MOST_ALLOWED_IDS", 40)
    body: dict[str, Any] = {"prompt": ["a", "b"], "max_tokens": 1, "allowed_token_ids": [5] * 10}
    assert await error_of(http, body | {"n": 2}) == (200, None)
    assert await error_of(http, body | {"n": 3, "temperature": 1}) == (400, "allowed_token_ids")
    assert len(cell.submissions) == 4


@pytest.mark.api("completions", "prompt", "n", "best_of")
@pytest.mark.api("chat.completions", "n")
async def test_more_answers_than_can_run_and_wait_at_once_are_not_told_to_come_back(
    http: httpx.AsyncClient, cell: CellStandIn
) -> None:
    """The queue of an idle cell refused them with "try again in 1 s", for ever."""
    cell.max_requests = 7
    body: dict[str, Any] = {"prompt": ["a", "b"], "max_tokens": 1, "temperature": 1}
    for changes, name in (({"n": 4}, "n"), ({"best_of": 4}, "best_of"), ({"prompt": ["a"] * 8}, "n")):
        response = await http.post(COMPLETIONS, json=body | changes)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, name)
        assert "no more than 7 requests can run and wait here at once" in error["message"]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "temperature": 1}
    assert (await http.post("/v1/chat/completions", json=chat | {"n": 8})).status_code == 400
    assert not cell.submissions
    assert await error_of(http, body | {"n": 3}) == (200, None)
    assert (await http.post("/v1/chat/completions", json=chat | {"n": 7})).status_code == 200


@pytest.mark.parametrize(
    "number", ["1e999", "-1E+400", "9" * 300 + "e9", "9" * 400 + ".5", "1.5e0000400", "[[1, 2e1000]]"]
)
def test_infinite_numbers_are_found_without_a_look_at_every_part(number: str) -> None:
    with pytest.raises(ApiError, match="finite number"):
        json_object(f'{{"a": {number}}}'.encode())


@pytest.mark.parametrize("text", ['{"a": 1e5}', '{"a": "1e999"}', '{"a": ' + "9" * 400 + "}", '{"a": []}'])
def test_other_numbers_are_taken(text: str) -> None:
    assert json_object(text).keys() == {"a"}


async def test_a_key_attaches_to_its_own_answers_only_so_often(tmp_path: Any) -> None:
    """Beyond its limit each took one of the places that all keys share."""
    import yaml

    from cluster.security_config import SecurityConfig
    from deployments.api_keys import hash_key
    from deployments.api_service import ApiService
    from deployments.authentication import Authenticator
    from deployments.openai_api import create_app
    from tests.fakes.tiny_tokenizer import ANSWER, codec, ids

    one, other = "a" * 30, "b" * 30
    keys = [
        {"name": "a", "hash": hash_key(one), "limits": {"max_concurrent": 1}},
        {"name": "b", "hash": hash_key(other)},
    ]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": keys}))
    cell = CellStandIn(lambda _: [*ids(ANSWER), *codec().eos_ids])
    cell.starved = True
    security = SecurityConfig(keys_file=tmp_path / "keys.yaml")
    authenticator = Authenticator(security, max_open=MOST_ATTACHED + 8, environment={})
    service = ApiService(cell, codec())
    app = create_app(service, authenticator=authenticator)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://cell") as http:
        headers = {"Authorization": f"Bearer {one}", "Idempotency-Key": "k"}

        async def ask() -> int:
            return (await http.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)).status_code

        asked = [asyncio.create_task(ask()) for _ in range(MOST_ATTACHED + 6)]
        done, waiting = await asyncio.wait(asked, timeout=1.0)
        assert [task.result() for task in done] == [429] * 5
        assert len(waiting) == 1 + MOST_ATTACHED
        bearer = {"Authorization": f"Bearer {other}"}
        assert (await http.post("/tokenize", json={"prompt": "x"}, headers=bearer)).status_code == 200
        for task in waiting:
            task.cancel()
        for task in waiting:
            with contextlib.suppress(asyncio.CancelledError):
                await task
    await service.close()
    await cell.close()
