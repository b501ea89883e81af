"""Tests of what GPUs do. Where there is none they run on an emulated one, with less of everything."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from cluster.model_paths import model_directory
from engine.triton_attention import TritonAttention
from tests.emulated_cuda import IS_NEEDED, Emulation, emulated_cuda
from tests.engine import tiny_models

PREPARE = TritonAttention.prepare
#: Kinds of models for which this process ran the kernels.
PREPARED: set[object] = set()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks them."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def prepared(attention: TritonAttention, layer: int, heads: int, norm: torch.Tensor | None = None) -> None:
    """`prepare`, but not for models like one before, for which Triton would have compiled all kernels."""
    kind = (attention._shapes[layer], attention._dtype, heads, None if norm is None else norm.shape)
    if kind not in PREPARED:
        PREPARED.add(kind)
        PREPARE(attention, layer, heads, norm)


@pytest.fixture(scope="module", autouse=True)
def emulation() -> Iterator[Emulation | None]:
    """Of a GPU, where there is none."""
    if not IS_NEEDED:
        yield None
        return
    # A forward takes Triton's interpreter a second.
    fewer = {
        "engine.warm_up.WARM_ROWS": 2,
        "engine.warm_up.CAPTURED_REQUESTS": (),
        "engine.warm_up.CAPTURED_WITH_PROMPT": (),
        "engine.transformers_loading.PROMPT_ROWS": (40,),
        "drafters.first_drafts.WIDTHS": (),
        "drafters.layer_graphs.USUAL_REQUESTS": (),
        "engine.triton_sampling._CUT_TOKENS": 512,
        # A GPU that few programs keep busy: keys are split for one request, and for some not.
        "engine.attention_tiles.ENOUGH_PROGRAMS": 8,
        "engine.triton_attention.MOST_SPLITS": 4,
    }
    with contextlib.ExitStack() as stack:
        for name, few in fewer.items():
            stack.enter_context(mock.patch(name, few))
        stack.enter_context(mock.patch.object(TritonAttention, "prepare", prepared))
        yield stack.enter_context(emulated_cuda())


@pytest.fixture
def emulated(emulation: Emulation | None) -> Emulation:
    """The emulated device, which counts launches."""
    if emulation is None:
        pytest.skip("launches are counted on the emulated GPU")
    return emulation


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo family's target; emulated, where Triton's kernels are interpreted, a tiny model."""
    if not IS_NEEDED:
        return model_directory("zoo:target-8x384")
    return tiny_models.write("llama_least", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of its drafters, or the tiny model."""
    if not IS_NEEDED:
        return model_directory("zoo:drafter-general-2x192")
    return tiny_models.write("llama_least", tmp_path_factory.mktemp("drafter"))
