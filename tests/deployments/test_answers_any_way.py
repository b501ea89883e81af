"""One answer whole, streamed and continued, of steps of any length, across lost cells: always the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from cluster.stream_messages import Submit
from tests.fakes.cell_stand_in import CellStandIn
from tests.fakes.tiny_tokenizer import codec, ids, tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = ("the", " and", "café", "🙂", "日本", "\n", "def ", "}", "a", " b", "<|user|>")
#: Some of which begin in one token and end in another, in the midst of a character, or in another of them.
STOPS = ("the", "d d", "é", "🙂", "an", " and t", "ab", "\n\n", "�", "日本日", "aa", "<|user|>", "de", "e")
STEPS = (1, 2, 3, 5, 8, 60)


def script(seed: int) -> Callable[[Submit], list[int]]:
    """What the model says: words, any tokens, ends, and ids that the tokenizer does not have."""
    size, ends = len(tokenizer()), sorted(codec().eos_ids)

    def say(submit: Submit) -> list[int]:
        chance = random.Random(f"{seed} {submit.sampling.seed} {submit.prompt}")
        tokens: list[int] = []
        while len(tokens) < 60:
            kind = chance.random()
            if kind < 0.5:
                tokens += ids(chance.choice(WORDS))
            elif kind < 0.93:
                tokens.append(chance.randrange(3, size))
            else:
                tokens.append(size + 3 if kind < 0.96 else chance.choice(ends))
        least, barred = submit.sampling.min_tokens, set(submit.sampling.stop_token_ids)
        other = next(token for token in ids("the café") if token not in barred)
        return [other if place < least and token in barred else token for place, token in enumerate(tokens)]

    return say


def drawn(chance: random.Random, path: str) -> dict[str, Any]:
    """A body with some of the fields that decide where an answer ends and what is shown of it."""
    most = chance.choice([1, 3, 10, 25, 50])
    size = len(tokenizer())
    body: dict[str, Any] = {
        "max_tokens": most,
        "seed": chance.randrange(1000),
        "n": chance.choice([1, 1, 2, 3]),
    }
    options: dict[str, Any] = {
        "stop": chance.sample(STOPS, chance.choice([1, 2, 4])),
        "include_stop_str_in_output": True,
        "min_tokens": chance.randrange(most + 1),
        "ignore_eos": True,
        "stop_token_ids": chance.sample(range(3, size), 6),
        "skip_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "hi"}]
        options["logprobs"] = True
    else:
        body["prompt"] = chance.choice(["hi", "caf", ["hi", "the"], [30, 31, 200]])
        options |= {"logprobs": chance.choice([0, 1, 3]), "echo": True}
    return body | {name: value for name, value in options.items() if chance.random() < 0.4}


def shown(answers: list[Any]) -> dict[int, dict[str, Any]]:
    """What one body, or the chunks of a stream, say in all; by choice."""
    found: dict[int, dict[str, Any]] = {}
    for choice in [choice for answer in answers for choice in answer["choices"]]:
        part = choice.get("message") or choice.get("delta") or choice
        one = found.setdefault(choice["index"], {"text": "", "tokens": [], "logprobs": [], "end": ()})
        one["text"] += part.get("content") or part.get("text") or ""
        one["tokens"] += choice.get("token_ids") or []
        logprobs = choice.get("logprobs") or {}
        one["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs") or []
        if choice.get("finish_reason"):
            one["end"] = (choice["finish_reason"], choice["stop_reason"])
    return found


def events_of(stream: str) -> list[tuple[str, Any, Any]]:
    """Of each event: its first line, which holds its id, what it says, and the counts."""
    found = []
    for event in stream.split("\n\n")[:-1]:
        data = event.partition("data: ")[2]
        chunk = {} if data == "[DONE]" else json.loads(data)
        assert "error" not in chunk, chunk
        found.append((event.partition("\n")[0], chunk.get("choices"), chunk.get("usage")))
    return found


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("seed", range(12))
async def test_an_answer_is_the_same_however_it_comes(
    app: FastAPI, http: httpx.AsyncClient, cell: CellStandIn, path: str, seed: int
) -> None:
    chance = random.Random(f"{path} {seed}")
    body = drawn(chance, path)
    cell.script = script(seed)

    async def ask(changed: dict[str, Any], per_step: int, headers: dict[str, str] | None = None) -> str:
        cell.per_step = per_step
        cell.lose_after = sorted(chance.sample(range(1, 40), chance.choice([0, 0, 1, 2])))
        answer = await http.post(path, json=body | changed, headers=headers)
        assert answer.status_code == 200, (body, answer.text)
        return answer.text

    first = json.loads(await ask({}, 1))
    whole = shown([first])
    assert all(one["end"] for one in whole.values())
    again = json.loads(await ask({}, chance.choice(STEPS[1:])))
    assert (shown([again]), again["usage"]) == (whole, first["usage"]), body

    streamed = {"stream": True, "stream_options": {"include_usage": chance.random() < 0.5}}
    chunks = [line[6:] for line in (await ask(streamed, chance.choice(STEPS))).splitlines() if line]
    assert chunks.pop() == "[DONE]"
    assert shown([json.loads(chunk) for chunk in chunks]) == whole, body

    # Front ends that do not know the answer give the same events at the same positions.
    runs = []
    for per_step in chance.sample(STEPS, 3):
        await app.state.answers.close()
        runs.append(events_of(await ask(streamed, per_step, {"Idempotency-Key": f"{path} {seed}"})))
    assert runs[0] == runs[1] == runs[2], body
    await app.state.answers.close()
    last = chance.randrange(len(runs[0]))
    headers = {"Idempotency-Key": f"{path} {seed}", "Last-Event-ID": str(last)}
    assert events_of(await ask(streamed, chance.choice(STEPS), headers)) == runs[0][last + 1 :], body
