"""Target and drafter with Triton's kernels, run by its interpreter: outputs are those without them."""

from __future__ import annotations

import pytest
import torch

from cluster.config import FlotillaConfig
from cluster.local import LocalEngine
from cluster.stream_messages import Submit
from engine.sampling_params import SamplingParams
from engine.triton_attention import TritonAttention
from tests.cluster.small_family import small_family

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu serves with the kernels"),
    # Rows of padding are whatever memory held: numpy warns of it, a GPU does not.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
NUM_TOKENS = 4
MODES = (
    SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS),
    SamplingParams(temperature=0.9, top_p=0.95, max_tokens=NUM_TOKENS, seed=3),
)


def outputs(attention: str) -> tuple[LocalEngine, list[list[int]]]:
    raw = small_family()  # the interpreter is slow
    raw["drafters"] = raw["drafters"][:1]
    for part in (raw["target"], *raw["drafters"]):
        part |= {"num_slots": 512, "attention": attention, "runner": "lean"}
    engine = LocalEngine(FlotillaConfig.model_validate(raw))
    done = engine.generate(
        [
            Submit(request_id=str(i), prompt=list(range(20 + i, 30 + i)), sampling=sampling)
            for i, sampling in enumerate(MODES)
        ]
    )
    return engine, [done[str(i)].tokens for i in range(len(MODES))]


def test_outputs_are_those_of_padded_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models pass their self-test with them, too; first forwards of every size would take a minute."""
    monkeypatch.setattr("engine.loading.warm_up", lambda runner: None)
    _, expected = outputs("padded")
    engine, found = outputs("triton")
    assert isinstance(engine.target.runner.attention, TritonAttention)
    assert found == expected
    assert all(len(tokens) == NUM_TOKENS for tokens in found)
