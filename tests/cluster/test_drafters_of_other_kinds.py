"""The suffix automaton and a drafter of another tokenizer in the whole pipeline, on the demo family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.config import FlotillaConfig
from cluster.drafter_config import ModelDrafterConfig
from cluster.local import LocalEngine
from cluster.model_paths import model_directory
from cluster.pool_drafter import build_pool_drafter
from cluster.stream_messages import Submit
from engine.sampling_params import SamplingParams
from zoo.registry import DOMAINS, load_prompts
from zoo.tokenizer import load

TARGET = "zoo:target-8x384"
OTHER = "zoo:drafter-vocab1024-2x128"
DRAFTERS: dict[str, dict[str, Any]] = {
    "retokenized": {"kind": "model", "name": "retokenized", "path": OTHER},
    "suffix": {"kind": "suffix_automaton", "name": "suffix"},
}


def engine(*names: str) -> LocalEngine:
    raw = {
        "target": {"path": TARGET},
        "drafters": [DRAFTERS[name] for name in names],
        "policy": {"name": "fixed", "fixed_depth": 4},
    }
    return LocalEngine(FlotillaConfig.model_validate(raw))


@pytest.fixture(scope="module")
def requests() -> list[Submit]:
    tokenizer = load(model_directory(TARGET))
    found: list[Submit] = []
    for domain in DOMAINS:
        for prompt in load_prompts(domain)[:2]:
            text = prompt.prompt or prompt.messages[-1]["content"]
            ids = tokenizer(text)["input_ids"]
            for temperature in (0.0, 0.8):
                sampling = SamplingParams(
                    temperature=temperature, seed=len(found), max_tokens=24, stop_token_ids=(2,)
                )
                found.append(Submit(request_id=f"r{len(found)}", prompt=ids, sampling=sampling))
    return found


@pytest.fixture(scope="module")
def expected(requests: list[Submit]) -> dict[str, list[int]]:
    return {name: completion.tokens for name, completion in engine().generate(requests).items()}


@pytest.mark.parametrize("names", [("retokenized",), ("suffix",), ("retokenized", "suffix")])
def test_the_text_is_the_targets_own(
    requests: list[Submit], expected: dict[str, list[int]], names: tuple[str, ...]
) -> None:
    running = engine(*names)
    for _ in range(2):  # the second time the suffix automaton knows the answers
        got = running.generate(requests)
        assert {name: completion.tokens for name, completion in got.items()} == expected
    accepted = sum(completion.receipt.num_accepted for completion in got.values() if completion.receipt)
    assert accepted > 0.2 * sum(map(len, expected.values()))


def test_another_tokenizer_is_refused_where_it_cannot_or_may_not_be_retokenized(tmp_path: Path) -> None:
    refused = ModelDrafterConfig(name="other", path=OTHER, retokenize=False)
    with pytest.raises(ValueError, match="`other` has another tokenizer than the target, and `retokenize`"):
        build_pool_drafter(refused, 4096, 1024, TARGET)
    source = model_directory(OTHER)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(source / name)
    bare = ModelDrafterConfig(name="bare", path=str(tmp_path))
    with pytest.raises(ValueError, match=r"`bare` has a vocabulary of 1024 tokens .* tokenizer\.json"):
        build_pool_drafter(bare, 4096, 1024, TARGET)


def test_a_drafter_with_the_targets_tokenizer_is_not_wrapped() -> None:
    config = ModelDrafterConfig(name="summary", path="zoo:drafter-summary-1x128", retokenize=False)
    assert build_pool_drafter(config, 4096, 1024, TARGET).capabilities.kind == "model"
    wrapped = build_pool_drafter(ModelDrafterConfig(name="other", path=OTHER), 4096, 1024, TARGET)
    assert (wrapped.capabilities.kind, wrapped.capabilities.vocab_size) == ("retokenized_model", 4096)
