"""The suffix automaton and a drafter of another tokenizer in the whole pipeline, on the demo family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

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
    "own": {
        "kind": "own",
        "name": "own",
        "import_path": "tests.fakes.repeating_drafter.Repeats",
        "options": {"raises": True},
    },
    "general": {"kind": "model", "name": "general", "path": "zoo:drafter-general-2x192"},
}


def configured(*names: str, target: str = TARGET) -> FlotillaConfig:
    raw = {
        "target": {"path": target},
        "drafters": [DRAFTERS[name] for name in names],
        "policy": {"name": "fixed", "fixed_depth": 4},
    }
    return FlotillaConfig.model_validate(raw)


def engine(*names: str, target: str = TARGET) -> LocalEngine:
    return LocalEngine(configured(*names, target=target))


@pytest.fixture(scope="module")
def loaded() -> LocalEngine:
    """With whichever drafters the last test gave it."""
    return engine()


def use(loaded: LocalEngine, *names: str) -> LocalEngine:
    """With these drafters, which know nothing yet."""
    config, shape = configured(*names), loaded.target.runner.shape
    loaded.drafters = {
        one.name: build_pool_drafter(one, shape.vocab_size, shape.max_tokens, TARGET)
        for one in config.drafters
    }
    loaded.use_policy(config)
    return loaded


@pytest.fixture(scope="module")
def requests() -> list[Submit]:
    tokenizer = load(model_directory(TARGET))
    found: list[Submit] = []
    for domain in DOMAINS:
        for prompt in load_prompts(domain)[:1]:
            text = prompt.prompt or prompt.messages[-1]["content"]
            ids = tokenizer(text)["input_ids"]
            for temperature in (0.0, 0.8):
                sampling = SamplingParams(
                    temperature=temperature, seed=len(found), max_tokens=16, stop_token_ids=(2,)
                )
                found.append(Submit(request_id=f"r{len(found)}", prompt=ids, sampling=sampling))
    return found


@pytest.fixture(scope="module")
def expected(loaded: LocalEngine, requests: list[Submit]) -> dict[str, list[int]]:
    return {name: completion.tokens for name, completion in use(loaded).generate(requests).items()}


@pytest.mark.parametrize("names", [("retokenized",), ("suffix",), ("retokenized", "suffix")])
def test_the_text_is_the_targets_own(
    loaded: LocalEngine, requests: list[Submit], expected: dict[str, list[int]], names: tuple[str, ...]
) -> None:
    running = use(loaded, *names)
    for _ in range(2):  # the second time the suffix automaton knows the answers
        got = running.generate(requests)
        assert {name: completion.tokens for name, completion in got.items()} == expected
    accepted = sum(completion.receipt.num_accepted for completion in got.values() if completion.receipt)
    assert accepted > 0.2 * sum(map(len, expected.values()))


def test_the_text_is_the_targets_own_whatever_a_drafter_of_a_users_own_proposes(
    loaded: LocalEngine,
    requests: list[Submit],
    expected: dict[str, list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    got = use(loaded, "own").generate(requests)
    assert {name: completion.tokens for name, completion in got.items()} == expected
    receipts = [completion.receipt for completion in got.values() if completion.receipt]
    assert sum(receipt.num_drafted for receipt in receipts) > 0
    assert {name for receipt in receipts for name in receipt.drafters} == {"own"}
    assert "failed in `propose`" in caplog.text


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with a larger vocabulary, of which no text has the rest, as a family's large models."""
    source, directory = model_directory(TARGET), tmp_path_factory.mktemp("padded")
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (directory / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 64}))
    weights = load_file(source / "model.safetensors")
    rows = weights["model.embed_tokens.weight"]
    more = rows[:1].expand(64, -1)  # as the token that pads batches, which no text has either
    weights["model.embed_tokens.weight"] = torch.cat([rows, more])
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.thorough
def test_a_drafter_that_lacks_the_targets_padding_drafts_as_if_it_had_it(
    requests: list[Submit], expected: dict[str, list[int]], padded: Path
) -> None:
    def receipts(target: str) -> list[tuple[int, int]]:
        running = engine("general", target=target)
        assert [one.capabilities.kind for one in running.core.pool.drafters.values()] == ["model"]
        got = running.generate(requests)
        assert {name: completion.tokens for name, completion in got.items()} == expected
        told = [completion.receipt for completion in got.values()]
        return [(one.num_drafted, one.num_accepted) for one in told if one is not None]

    # Sampled ones, too: the noise of a token is the same. In which step a drafter has read a prompt is a
    # matter of time, and on a busy machine not always the same: with other noise they never would be.
    for _ in range(5):
        known, lacking = receipts(TARGET), receipts(str(padded))
        if known == lacking:
            break
    assert known == lacking
    assert sum(accepted for _, accepted in lacking) > 0


@pytest.mark.thorough
def test_requests_that_name_a_token_the_drafter_lacks_are_not_drafted_for(
    requests: list[Submit], padded: Path
) -> None:
    last = 4096 + 63
    naming = [
        {"logit_bias": {last: 100.0}, "max_tokens": 3},  # is chosen, and so read by the drafter
        {"allowed_token_ids": (5, 6, last)},
        {"bad_words": ((last,),)},
        {"stop_token_ids": (2, last), "min_tokens": 4},
    ]
    submits = [
        msgspec.structs.replace(
            requests[0],
            request_id=f"{number}-{temperature}",
            sampling=msgspec.structs.replace(
                requests[0].sampling, **{"temperature": temperature, "max_tokens": 8, **names}
            ),
        )
        for number, names in enumerate(naming)
        for temperature in (0.0, 0.8)
    ]
    plain = engine(target=str(padded)).generate(submits)
    drafted = engine("general", target=str(padded)).generate(submits)
    assert plain["0-0.0"].tokens == [last] * 3
    for name, completion in drafted.items():
        assert completion.tokens == plain[name].tokens
        assert completion.receipt is not None
        assert completion.receipt.num_drafted == 0


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
