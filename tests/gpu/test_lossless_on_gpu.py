"""Target and drafters on a GPU: outputs are those of the target alone on a CPU, but for proven near ties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.near_ties import audit, explain
from benchmarks.transformers_engine import Reference
from cluster.config import FlotillaConfig
from cluster.local import LocalEngine
from cluster.model_paths import model_directory
from cluster.stream_messages import Submit
from deployments.demo import demo_config
from engine.devices import resolve_device
from engine.sampling_params import SamplingParams
from tests.cluster.small_family import small_family
from tests.emulated_cuda import IS_NEEDED

# Emulated, less of it: Triton's interpreter is slow.
PROMPTS, TOKENS = (3, 4) if IS_NEEDED else (12, 48)
MODES = (
    SamplingParams(temperature=0.0, max_tokens=TOKENS),
    SamplingParams(temperature=0.8, top_p=0.95, max_tokens=TOKENS, seed=3),
    SamplingParams(temperature=1.0, top_k=50, min_p=0.02, repetition_penalty=1.1, max_tokens=TOKENS, seed=4),
)


@pytest.mark.parametrize(
    "graphs", [pytest.param(False, marks=pytest.mark.skipif(IS_NEEDED, reason="the other is enough")), True]
)
def test_outputs_are_the_targets_own(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    raw: dict[str, Any] = small_family() if IS_NEEDED else demo_config().model_dump()
    if IS_NEEDED:
        raw["drafters"] = (raw["drafters"][0], raw["drafters"][-1])  # a model, and prompt lookup
        monkeypatch.setattr("engine.triton_sampling._CUT_TOKENS", 2048)  # of a vocabulary of 4096
    for part in (raw["target"], *raw["drafters"]):
        if "device" in part:
            part |= {"num_slots": 4096, "cuda_graphs": graphs}
            part |= {"attention": "padded"} if IS_NEEDED else {}
    engine = LocalEngine(FlotillaConfig.model_validate(raw))
    assert engine.target.device == resolve_device("cuda")
    reference = Reference(str(model_directory(raw["target"]["path"])))
    text = Path(__file__).read_text()
    prompts = [reference.tokenizer(text[i * 97 : i * 97 + 300])["input_ids"] for i in range(PROMPTS)]
    requests = [
        Submit(request_id=str(i), prompt=prompt, sampling=MODES[i % len(MODES)])
        for i, prompt in enumerate(prompts)
    ]
    done = engine.generate(requests)
    differing = 0
    for i, prompt in enumerate(prompts):
        output = done[str(i)].tokens
        alone = audit(reference, MODES[i % len(MODES)], prompt, output)
        if alone == output:
            continue
        differing += 1
        place = next(j for j, (a, b) in enumerate(zip(alone, output, strict=True)) if a != b)
        difference = explain(
            reference,
            MODES[i % len(MODES)],
            prompt,
            alone[: place + 1],
            output,
            index=i,
            domain="gpu",
            tolerance=1e-3,
        )
        assert difference.proven, difference
    assert differing <= 2
