"""The shape of EAGLE's layer is what Transformers understands, mostly without asking it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine import eagle_shape as shapes
from engine.eagle_shape import EagleShape, eagle_shape
from tests.examples import examples
from zoo.registry import EAGLE, weights_dir

SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}


def check(found: EagleShape, layer: dict[str, Any]) -> None:
    config = LlamaConfig(**layer)
    rotary = LlamaRotaryEmbedding(config)
    assert found[:6] == (
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.rms_norm_eps,
    )
    assert torch.equal(found.rotary.inv_freq, rotary.inv_freq)
    assert found.rotary.inv_freq.dtype == rotary.inv_freq.dtype
    assert found.rotary.attention_scaling == rotary.attention_scaling


@examples(60)
@given(
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3), (8, 1)]),
    dim=st.integers(1, 64),
    units=st.integers(1, 300),
    eps=st.sampled_from([1e-6, 1e-5, 0.01]),
    theta=st.one_of(st.integers(1000, 10**6), st.floats(1000.0, 1e7)),
    is_named=st.booleans(),
    is_new=st.booleans(),
)
def test_one_that_says_all_is_understood_alike(
    heads: tuple[int, int], dim: int, units: int, eps: float, theta: float, is_named: bool, is_new: bool
) -> None:
    layer: dict[str, Any] = {
        "hidden_size": 2 * dim * heads[0],
        "intermediate_size": units,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "rms_norm_eps": eps,
    }
    if is_named:
        layer["head_dim"] = 2 * dim
    if is_new:
        layer["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"}
    else:
        layer |= {"rope_theta": theta, "rope_scaling": None}
    found = shapes._plain(layer)
    assert found is not None
    check(found, layer)


@pytest.mark.parametrize(
    "changes",
    [
        {},  # whose base is Transformers' own
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ],
    ids=["unsaid", "scaled", "scaled, as Transformers 5 has it", "llama3"],
)
def test_others_are_transformers_to_understand(changes: dict[str, Any]) -> None:
    layer = {**SIZES, "max_position_embeddings": 64, **changes}
    assert shapes._plain(layer) is None
    check(eagle_shape(layer, 64), layer)


@pytest.mark.parametrize("name", SIZES)
def test_what_is_not_said_is_not_made_up(name: str) -> None:
    layer = {**SIZES, "rope_theta": 1e4}
    assert shapes._plain(layer) is not None
    for value in (None, "6", -1, True):
        assert shapes._plain({**layer, name: value}) is None


def test_a_worker_reads_eagles_layer_without_transformers() -> None:
    """It took each restart of a target with EAGLE seconds."""
    reads = (
        "import sys, torch; from pathlib import Path\n"
        "from engine.eagle_config import read_eagle_config\n"
        "from engine.eagle_weights import load_eagle_weights\n"
        f"directory = Path({str(weights_dir(EAGLE))!r})\n"
        "load_eagle_weights(directory, read_eagle_config(directory), max_tokens=64, dtype=torch.float32, "
        "device=torch.device('cpu'))\n"
        "assert 'transformers' not in sys.modules, 'Transformers was imported'"
    )
    subprocess.run([sys.executable, "-c", reads], check=True, timeout=120)
