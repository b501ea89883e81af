"""Requests of every sort at once, drafted for by every kind: each gets what it gets by itself, undrafted."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from cluster.config import FlotillaConfig
from cluster.local import Completion, LocalEngine
from cluster.stream_messages import Speculation, Submit
from deployments.demo import demo_config
from deployments.text_codec import TextCodec
from engine.constraint import Constraint
from engine.sampling_params import SamplingParams
from zoo.registry import TARGET, load_prompts, weights_dir

NUM_REQUESTS = 12
NUM_SLOTS = 420
NEAR_TIE = 1e-4
EOS = 2
CONSTRAINTS = (
    Constraint(kind="regex", text=r"(é|日|🙂|a){2,6}"),
    Constraint(kind="choice", text=json.dumps(["yes", "no", "né", "日本"])),
    Constraint(kind="json_schema", text='{"type": "array", "items": {"type": "integer"}, "maxItems": 4}'),
    Constraint(kind="json_object"),
)


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    raw = demo_config().model_dump()
    raw["target"]["num_slots"] = NUM_SLOTS
    raw["drafters"] = [
        *raw["drafters"],
        {"kind": "suffix_automaton", "name": "suffix"},
        {"kind": "eagle", "name": "eagle", "path": "zoo:eagle-1x384"},
        {"kind": "model", "name": "other", "path": "zoo:drafter-vocab1024-2x128"},
    ]
    return LocalEngine(FlotillaConfig.model_validate(raw))


def requests(chance: random.Random) -> list[Submit]:
    """Any of the options with any of the others, some prompts beginning as another does."""
    codec = TextCodec.load(weights_dir(TARGET))
    texts = [one.prompt or one.messages[-1]["content"] for one in load_prompts()]
    made: list[Submit] = []
    for number in range(NUM_REQUESTS):
        prompt = codec.encode(chance.choice(texts))[-chance.choice([20, 60, 120]) :]
        if made and chance.random() < 0.4:
            other = chance.choice(made).prompt
            prompt = [*other[: chance.randint(1, len(other))], chance.randrange(6, 4096)]
        made.append(Submit(request_id=f"r{number}", prompt=prompt, sampling=sampling(chance, codec)))
    return made


def sampling(chance: random.Random, codec: TextCodec) -> SamplingParams:
    """Neutral values are the likelier ones."""

    def one_of(neutral: Any, *others: Any) -> Any:
        return chance.choice([neutral, neutral, *others])

    constraint = chance.choice([None, None, None, *CONSTRAINTS])
    is_free = constraint is None
    words = ["the", "self", "return", "def", "list of"]
    max_tokens = chance.choice([1, 24, 40])
    return SamplingParams(
        temperature=chance.choice([0.0, 0.0, 0.8, 1.5]),
        top_k=one_of(0, 1, 10),
        top_p=one_of(1.0, 0.5, 0.95),
        min_p=one_of(0.0, 0.1),
        presence_penalty=one_of(0.0, -2.0, 0.5),
        frequency_penalty=one_of(0.0, 0.3),
        repetition_penalty=one_of(1.0, 0.9, 1.3),
        logit_bias=one_of({}, {EOS: 2.0, 300: 3.0}),
        allowed_token_ids=one_of((), (*range(200, 400), EOS)) if is_free else (),
        bad_words=one_of((), codec.bad_word_tokens(words)) if is_free else (),
        constraint=constraint,
        seed=chance.getrandbits(53),
        logprobs=one_of(None, 0, 3),
        prompt_logprobs=one_of(None, 0, 2),
        max_tokens=max_tokens,
        min_tokens=min(max_tokens, one_of(0, 5)),
        stop_token_ids=one_of((), (EOS, *range(250, 270))) if is_free else (EOS,),
    )


def configured(engine: LocalEngine, policy: str, **scheduler: object) -> None:
    raw = engine.config.model_dump()
    raw["policy"], raw["scheduler"] = {"name": policy}, scheduler
    # Otherwise what the run before has left to release would be missing from the pool.
    engine.target.verifier.forget_all(with_prefixes=True)
    engine.use_policy(FlotillaConfig.model_validate(raw))


@pytest.mark.parametrize(
    ("policy", "micro_batches", "seed"),
    [("flotilla", 1, 4), ("fixed", 2, 3), pytest.param("fixed", 1, 6, marks=pytest.mark.thorough)],
)
def test_mixed_requests(engine: LocalEngine, policy: str, micro_batches: int, seed: int) -> None:
    chance = random.Random(seed)
    asked = requests(chance)
    configured(engine, "autoregressive")
    expected = {one.request_id: engine.generate([one])[one.request_id] for one in asked}
    configured(engine, policy, micro_batches=micro_batches, prefill_chunk=32)
    wishes = [
        Speculation(max_tokens=chance.choice([None, None, 0, 1, 6]), trace=chance.random() < 0.2)
        for _ in asked
    ]
    found = engine.generate(
        [msgspec.structs.replace(one, speculation=wish) for one, wish in zip(asked, wishes, strict=True)]
    )
    for one in asked:
        check(one, found[one.request_id], expected[one.request_id])
    if policy != "flotilla":  # which drafts only where it expects to gain time by it
        assert engine.core.totals.accepted_tokens > 0


def check(asked: Submit, found: Completion, expected: Completion) -> None:
    receipt, alone = found.receipt, expected.receipt
    assert receipt is not None
    assert alone is not None
    if found.tokens != expected.tokens:
        assert min(receipt.min_gap, alone.min_gap) < NEAR_TIE
        return
    assert found.finish_reason == expected.finish_reason
    if asked.sampling.logprobs is not None:
        assert len(found.logprobs) == len(found.tokens)
    if asked.sampling.prompt_logprobs is not None:
        assert len(found.prompt_logprobs) == len(asked.prompt) - 1
    for name in ("logprobs", "prompt_logprobs"):
        for one, other in zip(getattr(found, name), getattr(expected, name), strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-3)
    # A step that ends with a drafted stop token has no bonus token.
    bonus_free = receipt.num_steps + receipt.num_accepted - len(found.tokens)
    assert bonus_free in ((0, 1) if found.finish_reason == "stop" else (0,))
    assert receipt.num_accepted == sum(receipt.drafters.values()) == sum(receipt.acceptance_by_depth)
    assert receipt.num_drafted >= receipt.num_verified >= receipt.num_accepted
