"""What every drafter says at every position of the target's own answers: what acceptance is fitted to.

The target answers held-out prompts of the demo family greedily; each drafter reads them token by token and
drafts one layer after each, by the calls that serve. Nothing is selected by what was drafted before, as it
would be in the steps of a running cell: those begin after rejections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.acceptance_table import AcceptanceTable
from benchmarks.drafter_scores import CONCURRENCY
from benchmarks.local_engine import with_concurrency
from benchmarks.prompts import Prompt
from cluster.config import FlotillaConfig
from cluster.local import LocalEngine
from cluster.stream_messages import Submit
from drafters.messages import DraftCall, DraftItem, DraftPlan
from drafters.protocol import Drafter
from engine.sampling_params import RequestSpec, SamplingParams

WIDTH = 4
# Left of the request's bound, so that it never limits a draft.
_ROOM = 8


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt with what the target makes of it.

    Attributes:
        domain: of the prompt.
        prompt, tokens: ids; `tokens` is the whole answer.
    """

    domain: str
    prompt: list[int]
    tokens: list[int]


def answers_of(
    engine: LocalEngine, prompts: Sequence[Prompt], end_tokens: Sequence[int], max_tokens: int | None = None
) -> list[Answer]:
    """The target's greedy answers, without speculation.

    Args:
        engine: of the target; its policy is autoregressive.
        prompts: as tokens.
        end_tokens: what ends an answer.
        max_tokens: bound on every answer's tokens.
    """
    found = []
    for first in range(0, len(prompts), CONCURRENCY):
        batch = prompts[first : first + CONCURRENCY]
        requests = []
        for number, prompt in enumerate(batch, start=first):
            bounds = [bound for bound in (prompt.max_tokens, max_tokens) if bound is not None]
            sampling = SamplingParams(
                temperature=0.0, max_tokens=min(bounds, default=128), stop_token_ids=tuple(end_tokens)
            )
            requests.append(
                Submit(request_id=str(number), prompt=list(prompt.token_ids or ()), sampling=sampling)
            )
        completions = engine.generate(requests)
        found += [
            Answer(
                domain=prompt.domain,
                prompt=request.prompt,
                tokens=list(completions[request.request_id].tokens),
            )
            for prompt, request in zip(batch, requests, strict=True)
        ]
    return found


def read_along(
    drafter: Drafter, answers: Sequence[Answer]
) -> list[tuple[NDArray[np.float32], NDArray[np.int8]]]:
    """By answer, what the drafter would have drafted after each of its tokens but the last.

    Returns:
        log-probabilities float32 [tokens - 1, WIDTH], descending, -inf where it proposed fewer; and which of
        them the next token was, int8 [tokens - 1], WIDTH if none.
    """
    said = []
    for answer in answers:
        count = max(0, len(answer.tokens) - 1)
        said.append((np.full((count, WIDTH), -np.inf, np.float32), np.full(count, WIDTH, np.int8)))
    plan = DraftPlan(depth=1, width=WIDTH)
    for position in range(1, max(len(answer.tokens) for answer in answers)):
        items, places = [], []
        for place, answer in enumerate(answers):
            if position >= len(answer.tokens):
                continue
            known = len(answer.prompt) + position
            spec, start, tokens = None, known - 1, np.array(answer.tokens[position - 1 : position], np.int32)
            if position == 1:
                sampling = SamplingParams(temperature=0.0, max_tokens=len(answer.tokens) + _ROOM)
                spec = RequestSpec(
                    request_id=f"log-{place}",
                    tokens=answer.prompt + answer.tokens[:1],
                    prompt_len=len(answer.prompt),
                    sampling=sampling,
                )
                start, tokens = 0, np.zeros(0, np.int32)
            items.append(
                DraftItem(request_id=f"log-{place}", start=start, tokens=tokens, plan=plan, spec=spec)
            )
            places.append(place)
        result = drafter.draft(DraftCall(call_id=position, items=items))
        if result.unknown:
            raise RuntimeError(f"a drafter has no room for {len(answers)} answers at once")
        for place, draft in zip(places, result.drafts, strict=True):
            logp, rank = said[place]
            tree = draft.tree
            width = min(WIDTH, tree.num_drafted)
            order = np.argsort(-tree.logp[1:], kind="stable")[:width]
            logp[position - 1, :width] = tree.logp[1:][order]
            right = np.flatnonzero(tree.token[1:][order] == answers[place].tokens[position])
            if len(right):
                rank[position - 1] = right[0]
    drafter.draft(DraftCall(call_id=0, items=[], release=[f"log-{place}" for place in range(len(answers))]))
    return said


def table_of(drafters: Mapping[str, Drafter], answers: Sequence[Answer]) -> AcceptanceTable:
    """What all drafters say along all answers; answers of a single token say nothing."""
    held = [answer for answer in answers if len(answer.tokens) > 1]
    parts: dict[str, list[NDArray[np.generic]]] = {
        name: [] for name in ("drafter", "answer", "position", "logp", "rank")
    }
    for index, drafter in enumerate(drafters.values()):
        for first in range(0, len(held), CONCURRENCY):
            for place, (logp, rank) in enumerate(read_along(drafter, held[first : first + CONCURRENCY])):
                count = len(rank)
                parts["drafter"].append(np.full(count, index, np.int16))
                parts["answer"].append(np.full(count, first + place, np.int32))
                parts["position"].append(np.arange(1, count + 1, dtype=np.int32))
                parts["logp"].append(logp)
                parts["rank"].append(rank)
    columns = {name: np.concatenate(pieces) for name, pieces in parts.items()}
    return AcceptanceTable(
        drafters=list(drafters), domains=[answer.domain for answer in held], width=WIDTH, **columns
    )


def record(
    config: FlotillaConfig,
    prompts: Sequence[Prompt],
    end_tokens: Sequence[int],
    max_tokens: int | None = None,
) -> AcceptanceTable:
    """Load the cell's models here, let the target answer and the drafters read along.

    Args:
        config: of the cell; drafters without probabilities are left out.
        prompts: as tokens.
        end_tokens: what ends an answer.
        max_tokens: bound on every answer's tokens.
    """
    torch.set_num_threads(1)
    policy = config.policy.model_copy(update={"name": "autoregressive"})
    engine = LocalEngine(with_concurrency(config.model_copy(update={"policy": policy}), CONCURRENCY))
    answers = answers_of(engine, prompts, end_tokens, max_tokens)
    drafters = {
        name: drafter for name, drafter in engine.drafters.items() if drafter.capabilities.has_probabilities
    }
    return table_of(drafters, answers)


def record_zoo(path: Path, config: FlotillaConfig, count: int | None = None) -> AcceptanceTable:
    """The log of the demo family's held-out prompts, or of `count` of each class; written to `path`."""
    from benchmarks import demo
    from benchmarks.compare_workload import Texts
    from benchmarks.prompts import zoo_prompts

    texts = Texts(demo.directory(config.target.path))
    chosen: list[Prompt] = []
    seen: dict[str, int] = {}
    for prompt in zoo_prompts():
        seen[prompt.domain] = seen.get(prompt.domain, 0) + 1
        if count is None or seen[prompt.domain] <= count:
            chosen.append(texts.encode(prompt))
    table = record(config, chosen, texts.end_tokens)
    table.save(path)
    return table
