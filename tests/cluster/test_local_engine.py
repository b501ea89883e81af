"""Core, target and drafters in one process: no policy or limit changes any text."""

from __future__ import annotations

import pytest

from cluster.config import FlotillaConfig
from cluster.local import LocalEngine, RequestRejected
from cluster.stream_messages import Speculation, Submit
from engine.sampling_params import SamplingParams
from tests.cluster.small_family import small_family

NUM_REQUESTS = 6  # two of each mode
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    return LocalEngine(FlotillaConfig.model_validate(small_family()))


def requests(**speculation: object) -> list[Submit]:
    """Greedy, sampled and penalised requests over arbitrary prompts, each with its own seed."""
    modes = (
        SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
        SamplingParams(temperature=0.8, top_p=0.95, max_tokens=MAX_TOKENS, logprobs=2),
        SamplingParams(
            temperature=1.0,
            top_k=50,
            min_p=0.02,
            presence_penalty=0.4,
            frequency_penalty=0.2,
            repetition_penalty=1.1,
            logit_bias={5: 3.0},
            min_tokens=4,
            max_tokens=MAX_TOKENS,
            stop_token_ids=(0,),
        ),
    )
    made = []
    for number in range(NUM_REQUESTS):
        mode = modes[number % len(modes)]
        sampling = SamplingParams(**{f: getattr(mode, f) for f in mode.__struct_fields__} | {"seed": number})
        prompt = [(17 * number + 31 * i) % 4000 + 4 for i in range(5 + 13 * number)]
        made.append(
            Submit(
                request_id=f"r{number}",
                prompt=prompt,
                sampling=sampling,
                speculation=Speculation(**speculation),  # type: ignore[arg-type]
            )
        )
    return made


@pytest.fixture(scope="module")
def expected(engine: LocalEngine) -> list[list[int]]:
    """Every request by itself, one token per step."""
    engine.use_policy(configured(engine, "autoregressive"))
    return [engine.generate([request])[request.request_id].tokens for request in requests()]


def configured(engine: LocalEngine, policy: str, **scheduler: object) -> FlotillaConfig:
    raw = engine.config.model_dump()
    raw["policy"] = {"name": policy}
    raw["scheduler"] = scheduler
    return FlotillaConfig.model_validate(raw)


@pytest.mark.parametrize(
    ("micro_batches", "policy"),
    [
        *[(1, policy) for policy in ("flotilla", "adaserve", "fixed", "autoregressive")],
        *[(2, policy) for policy in ("flotilla", "fixed")],
        # Requests are divided between micro-batches whatever the policy.
        *[pytest.param(2, policy, marks=pytest.mark.thorough) for policy in ("adaserve", "autoregressive")],
    ],
)
def test_every_policy_returns_what_plain_decoding_returns(
    engine: LocalEngine, expected: list[list[int]], policy: str, micro_batches: int
) -> None:
    engine.use_policy(configured(engine, policy, micro_batches=micro_batches, prefill_chunk=32))
    completions = engine.generate(requests())
    assert [completions[f"r{n}"].tokens for n in range(NUM_REQUESTS)] == expected
    if policy in ("adaserve", "fixed"):
        assert engine.core.totals.verified_tokens > 0


def test_every_drafter_alone_returns_the_same(engine: LocalEngine, expected: list[list[int]]) -> None:
    for name in engine.drafters:
        engine.use_policy(configured(engine, "fixed"))
        completions = engine.generate(requests(drafters=(name,)))
        assert [completions[f"r{n}"].tokens for n in range(NUM_REQUESTS)] == expected
        assert set(engine.core.totals.verified_by_drafter) <= {name}


def test_logprobs_are_the_same_with_and_without_speculation(engine: LocalEngine) -> None:
    outputs = []
    for policy in ("autoregressive", "adaserve"):
        engine.use_policy(configured(engine, policy))
        outputs.append(engine.generate(requests())["r1"].logprobs)
    plain, speculated = outputs
    assert len(plain) == len(speculated) > 0
    for one, other in zip(plain, speculated, strict=True):
        assert one.top_ids == other.top_ids
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_nothing_is_left_behind_in_the_kv_pool(engine: LocalEngine) -> None:
    engine.use_policy(configured(engine, "flotilla"))
    engine.generate(requests())
    engine.generate([requests()[0]])  # carries the releases of the others
    engine.use_policy(configured(engine, "flotilla"))
    assert engine.core.free_slots >= 2048 - 64


def test_a_request_that_cannot_be_served_says_why(engine: LocalEngine) -> None:
    with pytest.raises(RequestRejected, match="tokens"):
        engine.generate([Submit(request_id="long", prompt=[5] * 3000, sampling=SamplingParams())])
