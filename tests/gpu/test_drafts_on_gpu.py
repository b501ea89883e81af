"""Drafts grown on a GPU: those of the host, which the GPU never waits for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.drafter_config import ModelDrafterConfig
from cluster.placement_config import PlacementConfig
from cluster.pool_drafter import build_pool_drafter
from drafters.messages import DraftItem, DraftPlan
from drafters.model_drafter import ModelDrafter
from engine.attention_kinds import AttentionKind
from engine.best_tokens import highest, highest_by_triton
from engine.flashinfer_attention import why_not_flashinfer
from engine.loading import load_runner
from engine.sampling_params import SamplingParams
from tests.drafters.tiny import GREEDY, assert_same_tree, call, following, opening, trees
from tests.emulated_cuda import IS_NEEDED, Emulation
from tests.gpu.waiting import never_waiting

# Emulated, less of it: Triton's interpreter is slow.
DEPTH, CALLS = (2, 3) if IS_NEEDED else (5, 4)
LENGTHS = [6, 19, 34] if IS_NEEDED else [20, 45, 70]
MOST_LAUNCHES = 11  # of a layer
only_on_gpus = pytest.mark.skipif(IS_NEEDED, reason="emulated, wider drafts from captured forwards do")
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=999),
    SamplingParams(temperature=1.0, top_k=50, min_p=0.02, logit_bias={7: 2.0}, seed=4, max_tokens=999),
]


def drafting(
    directory: Path, attention: AttentionKind, *, on_device: bool, graphs: bool = True
) -> ModelDrafter:
    dtype = "bfloat16" if attention == "flashinfer" else "float32"
    runner = load_runner(
        directory,
        dtype=dtype,
        num_slots=4096,
        attention=attention,
        device="cuda",
        graphs=graphs,
        self_test=False,
    )
    return ModelDrafter(runner, on_device=on_device)


def calls(drafter: ModelDrafter, width: int, number: int = CALLS, new: int = 2) -> list[list[DraftItem]]:
    """Calls one after the other for three requests; all but the first are of the same shapes."""
    rng = np.random.default_rng(0)
    vocab = drafter.capabilities.vocab_size
    lengths = list(LENGTHS)
    plans = [DraftPlan(DEPTH, max(1, width - i)) for i in range(3)]
    found = [
        [
            opening(str(i), rng.integers(0, vocab, length).tolist(), plans[i], sampling=SAMPLINGS[i])
            for i, length in enumerate(lengths)
        ]
    ]
    for _ in range(number - 1):
        found.append(
            [following(str(i), lengths[i], rng.integers(0, vocab, new).tolist(), plans[i]) for i in range(3)]
        )
        lengths = [length + new for length in lengths]
    return found


@pytest.mark.parametrize("attention", [pytest.param("padded", marks=only_on_gpus), "triton"])
@pytest.mark.parametrize("graphs", [pytest.param(False, marks=only_on_gpus), True])
@pytest.mark.parametrize("width", [pytest.param(1, marks=only_on_gpus), 4])
def test_drafts_are_those_of_the_host(
    width: int, graphs: bool, attention: AttentionKind, drafter: Path, cuda: torch.device
) -> None:
    """In float32; what the two forward differs in shapes, so that near ties may be decided otherwise."""
    device = drafting(drafter, attention, on_device=True, graphs=graphs)
    host = drafting(drafter, attention, on_device=False, graphs=graphs)
    assert device._model.device == cuda
    for items in calls(device, width):
        found, expected = trees(device.draft(call(*items))), trees(host.draft(call(*items)))
        for name, tree in found.items():
            assert_same_tree(tree, expected[name])


def waits_for_events_only(device: ModelDrafter, width: int, *, new: int = 2) -> None:
    """The last of several calls; those before it capture."""
    *before, last = calls(device, width, number=CALLS + 1, new=new)
    for items in before:
        device.draft(call(*items))
    result = never_waiting(lambda: device.draft(call(*last)))
    assert result.num_forwards == DEPTH
    assert max(len(tree) for tree in trees(result).values()) == 1 + DEPTH * width


@pytest.mark.thorough
@pytest.mark.parametrize("attention", [pytest.param("padded", marks=only_on_gpus), "triton"])
@pytest.mark.parametrize("width", [pytest.param(1, marks=only_on_gpus), 4])
def test_a_call_waits_for_events_only(width: int, attention: AttentionKind, drafter: Path) -> None:
    waits_for_events_only(drafting(drafter, attention, on_device=True), width)


@pytest.mark.thorough
def test_a_layer_is_a_replay_and_few_launches(
    drafter: Path, emulated: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more layer, the rest as it is; of requests that are greedy, truncated and biased."""
    found = []
    for depth in (2, 3):
        monkeypatch.setitem(globals(), "DEPTH", depth)
        device = drafting(drafter, "triton", on_device=True)
        *before, last = calls(device, 2, number=3)
        for items in before:
            device.draft(call(*items))
        count = len(emulated.launches)
        device.draft(call(*last))
        found.append(emulated.launches[count:])
    assert [launches.count("replay") for launches in found] == [2, 3]
    assert len(found[1]) - len(found[0]) <= MOST_LAUNCHES


def test_chains_with_flashinfer_wait_for_events_only(drafter: Path, cuda: torch.device) -> None:
    if reason := why_not_flashinfer(torch.bfloat16, cuda, 64):
        pytest.skip(reason)
    # Two rows each would be captured with masks, whose planning waits.
    waits_for_events_only(drafting(drafter, "flashinfer", on_device=True), 1, new=1)


@pytest.mark.thorough
def test_kernels_of_usual_drafts_are_launched_before_a_drafter_serves(
    drafter: Path, emulated: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafters.first_drafts.WIDTHS", (2,))
    monkeypatch.setattr("drafters.first_drafts._DEPTHS", (3,))
    monkeypatch.setattr("drafters.layer_graphs.USUAL_REQUESTS", (1,))
    monkeypatch.setattr("engine.loading.warm_up", lambda *_: None)  # interpreted, half a minute
    config = ModelDrafterConfig(
        name="a", path=str(drafter), device="cuda", num_slots=64, placement=PlacementConfig(num_gpus=1)
    )
    vocab = load_runner(drafter, num_slots=8, self_test=False).shape.vocab_size
    before = len(emulated.launches)
    made = build_pool_drafter(config, vocab, 64, str(drafter))
    kernels = {"grow", "see", "best_of_block", "best_of_blocks", "scale_and_find_cuts", "cut_and_perturb"}
    assert kernels <= set(emulated.launches[before:])
    assert isinstance(made, ModelDrafter)
    assert made._graphs is not None
    assert len(made._graphs.shapes) == 4
    assert made.free_slots == 64


@pytest.mark.parametrize("vocab", [4096, 128_256])
def test_the_best_tokens_of_a_row(vocab: int, cuda: torch.device) -> None:
    """By the kernel, with many ties, against torch's own top k and softmax."""
    torch.manual_seed(0)
    scores = (torch.randn(9, vocab, device=cuda) * 8).round() / 4
    scores[:, ::3] = -torch.inf
    values, tokens = highest(torch.log_softmax(scores, dim=-1), 8)
    got_values, got_tokens = highest_by_triton(scores, 8)
    torch.testing.assert_close(got_values, values, atol=1e-5, rtol=1e-5)
    assert torch.equal(got_tokens, tokens)
