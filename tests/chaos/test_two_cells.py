"""Requests of every sort over two cells that die, drain and lose their workers: the target's own answers."""

from __future__ import annotations

import math
import random

import pytest

from cluster.config import FlotillaConfig
from cluster.invariants import check_at_rest
from cluster.stream_messages import Speculation, Submit
from engine.constraint import Constraint
from engine.logprobs import raw_logprobs
from engine.sampling_params import SamplingParams
from tests.chaos.two_cells import TARGET, FrontEnd, RealCell, Texts
from tests.verifier.grammars import END, Oracle
from tests.verifier.target import NEAR_TIE, VOCAB, spec_of
from verifier.messages import TokenLogprobs

ORACLE = Oracle(TARGET)
POLICIES = ("flotilla", "fixed", "adaserve", "autoregressive", "smartspec", "specserve")
CONSTRAINTS = (
    Constraint(kind="regex", text="(ab|xyz|[0-9]{2}){2,12}"),
    Constraint(kind="regex", text="x{9}y[01]z{12}"),
    Constraint(kind="choice", text='["abcabc","abcxy12","truefalse"]'),
    Constraint(kind="json_object"),
)


def sampling(rng: random.Random) -> SamplingParams:
    """Any of the options with any of the others."""
    constraint = rng.choice([None, None, None, *CONSTRAINTS])
    max_tokens = rng.choice([1, 2, 5, 20, 45])
    options = {
        "top_k": 8,
        "top_p": rng.choice([0.6, 0.95]),
        "min_p": 0.1,
        "presence_penalty": rng.choice([0.8, -1.0]),
        "frequency_penalty": 0.4,
        "repetition_penalty": rng.choice([1.3, 0.8]),
        "logit_bias": {7: 3.0, 9: -100.0, END: 2.0},
        "logprobs": rng.choice([0, 3]),
        "prompt_logprobs": rng.choice([0, 2]),
        "min_tokens": min(4, max_tokens),
        "stop_token_ids": rng.choice([(END, 20, 21, 22), ()]) if constraint is None else (END, 15),
    }
    if constraint is None:
        options |= {"allowed_token_ids": tuple(range(40)), "bad_words": ((5,), (7, 8), (3, 9, 2))}
    chosen = {name: value for name, value in options.items() if rng.random() < 0.3}
    return SamplingParams(
        **{"stop_token_ids": (END,), **chosen},
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0, 1.8]),
        constraint=constraint,
        seed=rng.getrandbits(60) - (1 << 59),
        max_tokens=max_tokens,
    )


def prompt_of(rng: random.Random, others: list[list[int]]) -> list[int]:
    """Of any length; some begin as another does."""
    if others and rng.random() < 0.5:
        other = rng.choice(others)
        return [*other[: rng.randint(1, len(other))], rng.randrange(2, VOCAB)]
    return [rng.randrange(2, VOCAB) for _ in range(rng.choice([1, 5, 16, 17, 33, 60]))]


def alone(request: Submit) -> list[int] | None:
    """What plain decoding gives; None if rounding might decide it."""
    spec = spec_of(request.request_id, list(request.prompt), request.sampling)
    output, gaps = (TARGET if request.sampling.constraint is None else ORACLE).decode(spec)
    is_sure = all(gap >= NEAR_TIE and not math.isnan(gap) for gap in gaps)
    return output if is_sure else None


def check_logprobs(tokens: list[int], first: int, told: list[TokenLogprobs], number: int | None) -> None:
    """Those of the tokens from the first one on."""
    if number is None:
        assert not told
        return
    expected = [
        raw_logprobs(TARGET.logits(tokens[:n]), [tokens[n]], number)[0] for n in range(first, len(tokens))
    ]
    assert len(told) == len(expected)
    for found, one in zip(told, expected, strict=True):
        logprob, _, top_logprobs, _ = one
        assert found.logprob == pytest.approx(logprob, abs=2e-3)
        assert found.top_logprobs == pytest.approx(top_logprobs, abs=2e-3)


@pytest.mark.parametrize(
    "seed", [0, 2, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 3, 4, 5))]
)
def test_every_answer_is_the_targets_own_across_cells(seed: int) -> None:
    rng, texts = random.Random(seed), Texts()
    # Before anything else is drawn, which depends on what forwards take: else a busy machine may see no loss.
    chances = [rng.random() for _ in range(120)]
    front_end = FrontEnd(rng)
    raw = {
        "target": {"path": "unused"},
        "policy": {"name": POLICIES[seed % len(POLICIES)]},
        "scheduler": {
            "prefill_chunk": rng.choice([17, 24, 40]),
            "max_running": 12,
            "max_waiting": 80,
            "micro_batches": rng.choice([1, 1, 2, 3]),
        },
    }
    config, num_slots = FlotillaConfig.model_validate(raw), rng.choice([230, 300, 500])
    cells = [RealCell(f"cell {n}", front_end, texts, config, num_slots) for n in range(2)]
    requests: dict[str, tuple[Submit, list[int]]] = {}
    left: set[str] = set()
    num_lost = 0
    for number, chance in enumerate(chances):
        cell = rng.choice(cells)
        if chance < 0.14:
            request = Submit(
                request_id=f"r{number}",
                prompt=prompt_of(rng, [list(other.prompt) for other, _ in requests.values()]),
                sampling=sampling(rng),
                speculation=Speculation(
                    mode=rng.choice(["auto"] * 4 + ["off"]), max_tokens=rng.choice([None] * 3 + [0, 2])
                ),
                priority=rng.choice([0, 0, 1, -1]),
            )
            if (output := alone(request)) is not None:
                requests[request.request_id] = (request, output)
                texts.add(list(request.prompt), output)
                front_end.submit(request, cell)
        elif chance < 0.17 and front_end.pending:
            left.add(name := rng.choice(sorted(front_end.pending)))
            front_end.leave(name, cells)
        elif chance < 0.2:
            num_lost += 1
            cell.start(with_target=rng.random() < 0.4)
            front_end.lost(cell)
        elif chance < 0.22:
            cell.drain()
        elif chance < 0.235:
            cell.lose_target()
        elif chance < 0.25:
            cell.lose_drafter(rng.choice(["good", "poor"]))
        else:
            cell.answer_one()
        if rng.random() < 0.3:
            rng.choice(cells).deliver()
        if rng.random() < 0.5:
            front_end.place_all(cells)
    while front_end.place_all(cells) or any(cell.answer_one() or cell.deliver() for cell in cells):
        pass

    assert not front_end.pending
    assert num_lost
    assert front_end.num_resubmitted
    for name, (request, output) in requests.items():
        answer, asked = front_end.answers[name], request.sampling
        assert answer.tokens == (output[: len(answer.tokens)] if name in left else output), name
        if name in left:
            continue
        assert answer.ends == ["stop" if output[-1] in asked.stop_token_ids else "length"], name
        check_logprobs([*request.prompt, *output], len(request.prompt), answer.logprobs, asked.logprobs)
        check_logprobs(list(request.prompt), 1, answer.prompt_logprobs, asked.prompt_logprobs)
    for cell in cells:
        check_at_rest(cell.core)
        cell.verifier.forget_all(with_prefixes=True)
        assert cell.verifier.free_slots == cell.num_slots
    assert config.policy.name == "autoregressive" or front_end.num_accepted
