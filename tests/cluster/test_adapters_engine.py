"""Adapters of a target: whatever drafts, a request gets what the merged model would have written."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from cluster.config import FlotillaConfig
from cluster.local import LocalEngine
from cluster.stream_messages import Submit
from engine.sampling_params import SamplingParams
from tests.cluster.small_family import TARGET, small_family
from tests.engine import tiny_adapters
from zoo.registry import weights_dir

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16)
PROMPTS = [[(17 * number + 31 * i) % 4000 + 4 for i in range(8 + 5 * number)] for number in range(4)]
NAMES = ("", "first", "second")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    parent = tmp_path_factory.mktemp("adapters")
    return [
        tiny_adapters.write(weights_dir(TARGET), parent / name, seed=number, rank=number, alpha=2.0 * number)
        for number, name in enumerate(NAMES)
        if name
    ]


@pytest.fixture(scope="module")
def engine(adapters: list[Path]) -> LocalEngine:
    raw = small_family()
    raw["target"]["adapters"] = [{"name": path.name, "path": str(path)} for path in adapters]
    return LocalEngine(FlotillaConfig.model_validate(raw))


def submits() -> list[Submit]:
    """The same prompts with every adapter and with none, side by side."""
    return [
        Submit(
            request_id=f"r{number}-{name}-{kind}",
            prompt=prompt,
            sampling=msgspec.structs.replace(params, seed=number),
            adapter=name,
        )
        for number, prompt in enumerate(PROMPTS)
        for name in NAMES
        for kind, params in (("greedy", GREEDY), ("sampled", SAMPLED))
        if kind == "greedy" or number < 2
    ]


def texts(engine: LocalEngine, requests: list[Submit]) -> dict[str, list[int]]:
    return {name: one.tokens for name, one in engine.generate(requests).items()}


@pytest.fixture(scope="module")
def expected(engine: LocalEngine) -> dict[str, list[int]]:
    """Every request by itself, one token per step."""
    use(engine, "autoregressive")
    return {one.request_id: engine.generate([one])[one.request_id].tokens for one in submits()}


def use(engine: LocalEngine, policy: str, **scheduler: object) -> None:
    raw = engine.config.model_dump()
    raw["policy"], raw["scheduler"] = {"name": policy}, scheduler
    engine.use_policy(FlotillaConfig.model_validate(raw))


@torch.inference_mode()
def test_an_adapted_text_is_that_of_the_merged_model(
    expected: dict[str, list[int]], adapters: list[Path]
) -> None:
    for name, path in zip(NAMES, (None, *adapters), strict=True):
        model = tiny_adapters.merged(weights_dir(TARGET), path)
        for number, prompt in enumerate(PROMPTS):
            told = expected[f"r{number}-{name}-greedy"]
            logits = tiny_adapters.logits(model, np.array([*prompt, *told[:-1]]))[len(prompt) - 1 :]
            best = logits.max(dim=1).values
            chosen = logits.gather(1, torch.tensor(told)[:, None])[:, 0]
            assert float((best - chosen).max()) < 1e-3  # the most probable, but for near ties
    # Else equality would say nothing of the adapters.
    ends = [[expected[f"r{number}-{name}-greedy"] for number in range(len(PROMPTS))] for name in NAMES]
    assert ends[0] != ends[1] != ends[2] != ends[0]


@pytest.mark.parametrize(
    ("policy", "micro_batches"),
    [("flotilla", 1), ("fixed", 2), pytest.param("adaserve", 1, marks=pytest.mark.thorough)],
)
def test_every_policy_returns_what_plain_decoding_returns(
    engine: LocalEngine, expected: dict[str, list[int]], policy: str, micro_batches: int
) -> None:
    use(engine, policy, micro_batches=micro_batches, prefill_chunk=16)
    assert texts(engine, submits()) == expected
    if policy != "flotilla":
        assert engine.core.totals.verified_tokens > 0


def test_prompts_are_shared_within_an_adapter_and_a_salt(engine: LocalEngine) -> None:
    use(engine, "autoregressive")
    prompt = [7 + i % 50 for i in range(80)]
    brief = msgspec.structs.replace(GREEDY, max_tokens=2)

    def cached(request_id: str, adapter: str, salt: str) -> int:
        request = Submit(
            request_id=request_id, prompt=prompt, sampling=brief, adapter=adapter, cache_salt=salt
        )
        receipt = engine.generate([request])[request_id].receipt
        assert receipt is not None
        return receipt.num_cached_tokens

    spaces = [("", ""), ("first", ""), ("second", ""), ("", "mine"), ("first", "mine"), ("", "yours")]
    assert [cached(f"a{number}", *space) for number, space in enumerate(spaces)] == [0] * len(spaces)
    assert [cached(f"b{number}", *space) for number, space in enumerate(spaces)] == [79] * len(spaces)
